"""`tfglm serve` on a machine that runs out of memory: it drains and stops, and says why."""

from pathlib import Path

from processes import ServerProcess

from tfglm.checkpoint.synth import write_checkpoint

SCRIPT = """
import sys
from pathlib import Path
from tfglm.memory import info
whole, available = info.read_memory, info.read_available
info.read_memory = lambda sysroot=None: whole(Path(sys.argv[1]))
info.read_available = lambda sysroot=None: available(Path(sys.argv[1]))
from tfglm.cli.main import main
sys.exit(main(sys.argv[2:]))
"""

ON_CPU = {"TFGLM_DEVICE": "cpu"}  # whose memory the machine's is


def have(sysroot: Path, gib: float) -> None:
    (sysroot / "proc").mkdir(exist_ok=True)
    new = sysroot / "proc/meminfo.new"
    new.write_text(f"MemTotal: 16777216 kB\nMemAvailable: {round(gib * 2**20)} kB\n")
    new.replace(sysroot / "proc/meminfo")


def test_a_server_whose_memory_runs_short_stops_in_order(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny", "tiny", 1)
    have(tmp_path, 8)
    command = ("serve", tmp_path / "tiny", "--port", "0", "--drafter", "none", "--copy", "0", "--context", "512")
    with ServerProcess("-c", SCRIPT, tmp_path, *command, environ=ON_CPU) as server:
        server.wait_for("(tfglm serves)")
        have(tmp_path, 0.2)
        server.wait_for("(E_MEMORY: 0.20 GiB are available)", 30)
        server.wait_for("(the least memory available was 0.20 GiB)", 30)
        server.wait_for("(tfglm: E_MEMORY: the server stopped because memory ran short)", 30)
        assert server.ended() == 1


def test_a_server_that_does_not_fit_is_refused_before_it_loads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny", "tiny", 1)
    have(tmp_path, 1.0)
    with ServerProcess("-c", SCRIPT, tmp_path, "serve", tmp_path / "tiny", "--port", "0", environ=ON_CPU) as server:
        server.wait_for("(E_MEMORY: .* are available, .* too few: no window fits)")
        assert server.ended() == 1
