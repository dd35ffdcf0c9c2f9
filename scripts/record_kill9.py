"""Record the kill -9 demonstration of the README as an animated SVG.

python -m scripts.record_kill9 [--svg docs/images/kill9.svg] [--text FILE] [--speed 6]

Runs the two commands of the README in tmux, one pane each, captures the screen every half second,
and draws the captured screens unedited. The animation plays the recording `--speed` times faster
and repeats it. Needs tmux. Run it from the top of the repository.
"""

import argparse
import html
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

COLUMNS, LAUNCH_ROWS, KILL_ROWS = 112, 21, 3
LAUNCH = (
    "torchtitan-lite launch --replicas 2 --nproc-per-replica 1 -- "
    "--config configs/llama3_debug_ft.toml"
)
KILL = "kill -9 $(cat outputs/llama3_debug_ft/launch_logs/replica_001/rank_0.pid)"
SESSION = "kill9"
INTERVAL_S = 0.5
LIMIT_S = 240.0
LAST_SCREEN_S = 4.0
"""Time that the animation shows the last screen."""

CHAR_WIDTH, LINE_HEIGHT, MARGIN = 7.2, 15.0, 10.0
_PAGE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}">
<style>text {{ font: 12px Menlo, Consolas, monospace; white-space: pre }}</style>
<rect width="100%" height="100%" rx="6" fill="{background}"/>
{lines}
</svg>
"""


@dataclass(frozen=True)
class Screen:
    """The contents of both panes at one time."""

    time_s: float
    rows: tuple[str, ...]
    """Rows with ANSI escape sequences."""

    @property
    def plain(self) -> str:
        """Return the screen without colors."""
        return "\n".join(Text.from_ansi(row).plain for row in self.rows)


def main() -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Record the kill -9 demonstration as an SVG.")
    parser.add_argument("--svg", type=Path, default=Path("docs/images/kill9.svg"))
    parser.add_argument("--text", type=Path, help="also write the last screen as text")
    parser.add_argument("--speed", type=float, default=6.0, help="of the animation (default 6)")
    parser.add_argument("--launch", default=LAUNCH, help="the command of the upper pane")
    options = parser.parse_args()
    screens = record(options.launch)
    options.svg.parent.mkdir(parents=True, exist_ok=True)
    options.svg.write_text(animation(screens, options.speed), encoding="utf-8")
    if options.text:
        options.text.write_text(screens[-1].plain + "\n", encoding="utf-8")
    print(
        f"{options.svg}: {len(screens)} screens of {screens[-1].time_s - screens[0].time_s:.0f} s"
    )
    return 0


def record(launch: str) -> list[Screen]:
    """Run the demonstration and return the screens that differ from the one before."""
    rows = LAUNCH_ROWS + KILL_ROWS + 1
    _tmux("new-session", "-d", "-s", SESSION, "-x", str(COLUMNS), "-y", str(rows), "bash --norc")
    screens: list[Screen] = []
    try:
        _tmux("set-option", "-t", SESSION, "status", "off")
        _tmux("split-window", "-t", f"{SESSION}:0.0", "-v", "-l", str(KILL_ROWS), "bash --norc")
        activated = f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"
        for pane in (0, 1):
            _type(pane, f"{activated} PS1='$ '; clear")
        time.sleep(2)
        _type(0, launch)
        both_train = re.compile(r"replica 0 +training +\d.*replica 1 +training +\d", re.DOTALL)
        _watch(screens, lambda screen: both_train.search(screen) is not None)
        _watch(screens, _passed(8))
        _type(1, KILL)
        _watch(screens, lambda screen: "SIGKILL" in screen)
        _watch(screens, lambda screen: both_train.search(screen) is not None)
        _watch(screens, _passed(8))
        _tmux("send-keys", "-t", f"{SESSION}:0.0", "C-c")
        # The final output of the run is not part of the recording.
        _watch([*screens], lambda screen: screen.count("goodput") >= 2)
    finally:
        _tmux("kill-session", "-t", SESSION)
    return screens


def animation(screens: list[Screen], speed: float) -> str:
    """Return the recording as an SVG. A viewer without animations shows the last screen."""
    starts_s = [(screen.time_s - screens[0].time_s) / speed for screen in screens]
    total_s = starts_s[-1] + LAST_SCREEN_S
    lines = []
    for row in range(len(screens[0].rows)):
        first = 0
        for index in range(1, len(screens) + 1):
            last = index == len(screens)
            if not last and screens[index].rows[row] == screens[first].rows[row]:
                continue
            drawn = _draw(screens[first].rows[row], row)
            end_s = total_s if last else starts_s[index]
            if drawn:
                lines.append(_shown(drawn, starts_s[first] / total_s, end_s / total_s, total_s))
            first = index
    return _PAGE.format(
        width=COLUMNS * CHAR_WIDTH + 2 * MARGIN,
        height=len(screens[0].rows) * LINE_HEIGHT + 2 * MARGIN,
        background=SVG_EXPORT_THEME.background_color.hex,
        lines="\n".join(lines),
    )


def _shown(drawn: str, begin: float, end: float, total_s: float) -> str:
    """Show `drawn` from `begin` to `end`, as fractions of the animation."""
    if begin == 0 and end == 1:
        return f"<g>{drawn}</g>"
    values, times = ("0;1;0", f"0;{begin:.4f};{end:.4f}")
    if begin == 0:
        values, times = ("1;0", f"0;{end:.4f}")
    elif end == 1:
        values, times = ("0;1", f"0;{begin:.4f}")
    return (
        f'<g opacity="{int(end == 1)}"><animate attributeName="opacity" calcMode="discrete" '
        f'values="{values}" keyTimes="{times}" dur="{total_s:.2f}s" repeatCount="indefinite"/>'
        f"{drawn}</g>"
    )


def _draw(ansi: str, row: int) -> str:
    theme, console = SVG_EXPORT_THEME, Console(width=COLUMNS, color_system="truecolor")
    y = MARGIN + (row + 0.8) * LINE_HEIGHT
    column, drawn = 0, []
    for segment in Text.from_ansi(ansi.rstrip()).render(console):
        text = segment.text.rstrip("\n")
        style = segment.style
        color = theme.foreground_color.hex
        if style is not None and style.color is not None and not style.color.is_default:
            color = style.color.get_truecolor(theme).hex
        weight = ' font-weight="bold"' if style is not None and style.bold else ""
        # Viewers render consecutive spaces differently.
        for match in re.finditer(r"\S+(?: \S+)*", text):
            drawn.append(
                f'<text x="{MARGIN + (column + match.start()) * CHAR_WIDTH:.1f}" y="{y:.1f}" '
                f'fill="{color}"{weight} textLength="{len(match[0]) * CHAR_WIDTH:.1f}">'
                f"{html.escape(match[0])}</text>"
            )
        column += len(text)
    return "".join(drawn)


def _passed(duration_s: float) -> Callable[[str], bool]:
    until_s = time.monotonic() + duration_s
    return lambda _: time.monotonic() >= until_s


def _watch(screens: list[Screen], ends: Callable[[str], bool]) -> None:
    """Record each new screen until `ends` is true for one."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        screen = _screen()
        if not screens or screen.rows != screens[-1].rows:
            screens.append(screen)
        if ends(screen.plain):
            return
        time.sleep(INTERVAL_S)
    sys.exit(f"The demonstration got no further than:\n{screens[-1].plain}")


def _screen() -> Screen:
    panes = [_tmux("capture-pane", "-e", "-p", "-t", f"{SESSION}:0.{pane}") for pane in (0, 1)]
    rows = [pane.removesuffix("\n").split("\n") for pane in panes]
    return Screen(time.monotonic(), (*rows[0], "─" * COLUMNS, *rows[1]))


def _type(pane: int, line: str) -> None:
    _tmux("send-keys", "-t", f"{SESSION}:0.{pane}", "-l", line)
    _tmux("send-keys", "-t", f"{SESSION}:0.{pane}", "Enter")


def _tmux(*arguments: str) -> str:
    return subprocess.run(
        ["tmux", "-L", SESSION, *arguments], check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
