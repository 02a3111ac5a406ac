"""`tfglm serve` without a path serves the model that comes with it; the README's first requests get real answers."""

from openai import OpenAI
from processes import ServerProcess

QUESTION = "Ann has 40, Ben has 12. Ann gives Ben 25. Ben pays Ann 9. How much does Ann have now?"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_it_thinks_answers_and_calls_a_tool() -> None:
    with ServerProcess("-m", "tfglm.cli.main", "serve", "--port", "0", "--context", "2048", "--threads", "2") as server:
        url = server.wait_for(r"tfglm serves glm-5\.3-tiny, .* at (http://\S+)/v1", 240)
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def reply(text: str, **fields: object) -> dict[str, object]:
            asked = [{"role": "user", "content": text}]
            made = client.chat.completions.create(model="glm-5.3-tiny", messages=asked, temperature=0, **fields)  # type: ignore[call-overload]
            return dict(made.choices[0].message.model_dump())

        answer = reply(QUESTION)
        assert "40 - 25 = 15" in str(answer["reasoning_content"]) and str(answer["content"]).strip() == "24"
        called = str(reply("How is the weather in Lisbon today?", tools=[WEATHER]))
        assert "get_weather" in called and "Lisbon" in called
