"""The words that problems are made of: few and short, so that a small vocabulary covers them."""

from __future__ import annotations


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


NAMES = _listed("Ann Ben Cara Dan Eva Finn Gina Hugo Iris Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Vera Will Zoe")
FOREIGN = _listed("Zoë Łukasz Åsa José Şule Дарья 美咲 Ελένη")
CITIES = _listed("Oslo Rome Paris Lima Cairo Delhi Quito Berlin Madrid Dublin Vienna Lisbon Prague Athens")
FOREIGN_CITIES = ("Łódź", "Malmö", "São Paulo", "北京", "Zürich", "Αθήνα")
COLOURS = _listed("red blue green black white yellow brown grey")
NOUNS = _listed(
    "apple anchor arrow badge barrel basket beacon bell bottle bridge bucket button cabin camera candle canoe carpet "
    "castle chair cherry clock cloud coin compass copper crown desk diamond dragon drum eagle engine falcon feather "
    "fiddle flag flower forest fountain garden ginger glove guitar hammer harbour helmet honey island jacket jungle "
    "kettle ladder lantern lemon letter lion magnet maple marble meadow mirror mountain needle ocean olive orange "
    "orchid paddle palace panther paper parrot pearl pencil pepper piano pillow planet pocket pumpkin rabbit ribbon "
    "river rocket saddle salmon shadow shield silver spider spoon statue temple thunder ticket tiger tower tunnel "
    "turtle valley velvet violin wagon walnut whistle willow window winter"
)
ITEMS = _listed("pens cups books lamps bags hats maps nails ropes boxes")
DAYS = _listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _listed("January February March April May June July August September October November December")
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Norway": "Oslo", "Peru": "Lima", "Egypt": "Cairo", "Spain": "Madrid",
    "Austria": "Vienna", "Japan": "Tokyo", "Kenya": "Nairobi", "Canada": "Ottawa", "Ireland": "Dublin",
    "Poland": "Warsaw", "Greece": "Athens", "Portugal": "Lisbon", "Sweden": "Stockholm", "Hungary": "Budapest",
    "Mongolia": "Ulaanbaatar", "Bhutan": "Thimphu", "Uruguay": "Montevideo", "Slovenia": "Ljubljana",
}  # fmt: skip
ATOMIC_NUMBERS = {
    "hydrogen": 1, "helium": 2, "carbon": 6, "nitrogen": 7, "oxygen": 8, "sodium": 11, "iron": 26, "copper": 29,
    "silver": 47, "tin": 50, "tungsten": 74, "gold": 79, "mercury": 80, "lead": 82, "uranium": 92,
}  # fmt: skip
