"""Every command of the documentation runs, or is listed here with the reason why it cannot."""

import re
from pathlib import Path

import pytest

from tests.end_to_end.docs_commands import ROOT, Block, Page, blocks, copy_tree, pages, split

NOT_RUN = {
    r"make test\b": "runs this test",
    r"make (chaos|bench|test-all)\b": "takes many minutes; other tests run small versions",
    r"sbatch |scancel |squeue ": "needs Slurm; tests/resilience/slurm runs the script",
    r"kubectl ": "needs Kubernetes; tests/unit/test_deploy_schemas.py checks the manifest",
    r"docker ": "needs a container engine",
    r"(?s)torchrun --nnodes.*--rdzv-endpoint": "needs several machines",
    r"(HF_HUB_OFFLINE=1 )?\.venv-lm-eval/": "needs lm-eval in an environment of its own",
    r"python3 -m venv \.venv-lm-eval": "creates that environment",
    r"torchtitan-lite coordinator (--bind NODE0|--status 10\.)": "needs several machines",
    r"(?s)until torchrun ": "needs several machines",
    r"torchtitan-lite train .*--rdzv-endpoint NODE0": "needs several machines",
    r"head=|srun ": "needs Slurm",
    r"torchtitan-lite train --nproc 8 ": "needs a file of torchtitan and 8 processes",
    r"torchrun \.\.\.": "stands for the options of a cluster",
    r"export TORCHTITAN_LITE_TOKEN=\.\.\.": "stands for a secret",
    r"torchtitan-lite launch .* 1:4 ": "8 ranks; see tests/resilience/test_launch.py",
    r"torchtitan-lite launch .* --spares 1 ": "does not end; "
    "tests/resilience/test_launch_with_spares.py launches it",
    r"python -m tests\.chaos ": "takes many minutes; tests/resilience/test_chaos.py injects fewer",
    r"make test-gpu|python -m benchmarks\.gpu |(\S+ )?bash scripts/gpu_suite\.sh (test|bench) ": (
        "needs a GPU; tests/end_to_end/test_gpu_preparation.py runs them on a CPU"
    ),
    r"bash scripts/gpu_suite\.sh prepare ": "downloads; see the same test",
    r"torchtitan-lite subscribe ": "needs a run that continues; tests/end_to_end/test_publish.py",
    r"torchtitan-lite resize ": "needs a run that continues; tests/resilience/test_live_resize.py",
    r"py-spy ": "needs an extra package and the right to trace processes",
}
"""Maps the pattern of a command's beginning to the reason."""
RUN_ON_ANOTHER_PAGE = {"docs/guides/first_run.md": {"make train": "README.md"}}
"""Commands of a page that are already run on another one."""
PREPARED = {
    "docs/report.md": Block(
        (
            "torchrun --nproc-per-node 2 train.py --config configs/llama3_debug.toml",
            "for name in before after reference candidate; do "
            "cp -r outputs/llama3_debug outputs/$name; done",
        )
    )
}
"""Runs that a page presupposes."""
COVERED = {
    "docs/pretrained_weights.md": "tests/end_to_end/test_pretrained_guide.py",
    "docs/pretrained_weights.zh-CN.md": "has the same commands",
    "README.zh-CN.md": "has the same commands",
    "docs/extending.md": "tests/end_to_end/test_extending.py",
    "docs/python_api.md": "tests/end_to_end/test_extending.py",
    "docs/interchange.md": "tests/end_to_end/test_convert_dcp.py",
    "docs/guides/fine_tuning.md": "tests/end_to_end/test_fine_tuning.py",
}
"""Pages whose commands another test runs."""


def reason(command: str) -> str | None:
    """Return why a command is not run; None if it is run."""
    reasons = (why for pattern, why in NOT_RUN.items() if re.match(pattern, command))
    return next(reasons, None)


def run_page(page: str, folder: Path) -> str:
    """Run the commands of a page and return what they print."""
    copy_tree(folder)
    running = Page(folder, {})
    elsewhere = RUN_ON_ANOTHER_PAGE.get(page, {})
    try:
        if page in PREPARED:
            running.run(PREPARED[page], [])
        for block in blocks(page):
            running.run(block, [c for c in block.commands if c in elsewhere or reason(c)])
    finally:
        running.close()
    return running.output


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [p for p in pages() if p not in COVERED])
def test_commands_of_a_page(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path / "tree")


def test_every_page_is_run_or_covered() -> None:
    for test in COVERED.values():
        assert " " in test or (ROOT / test).exists()
    for page, elsewhere in RUN_ON_ANOTHER_PAGE.items():
        for command, other in elsewhere.items():
            for one in (page, other):
                page_commands = [c for block in blocks(one) for c in block.commands]
                assert any(c.partition("#")[0].strip() == command for c in page_commands)
    # Reasons that no command needs must be removed.
    commands = [command for page in pages() for block in blocks(page) for command in block.commands]
    unused = [pattern for pattern in NOT_RUN if not any(re.match(pattern, c) for c in commands)]
    assert unused == []


def test_both_readmes_have_the_same_commands_tables_and_links() -> None:
    english, chinese = "README.md", "README.zh-CN.md"
    assert blocks(english) == blocks(chinese)
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in (english, chinese)]
    # What no translation changes: code, versions, figures with their origins.
    fixed = re.compile(r"`[^`]+`|\d[\d.,]*|<!-- figure: .*?-->")
    tables = [
        [sorted(fixed.findall(re.sub(r"\(\S+\)", "", row))) for row in rows]
        for rows in (re.findall(r"^\|.*\|$", text, re.MULTILINE) for text in texts)
    ]
    assert tables[0] == tables[1]
    headings = [re.findall(r"^#+ ", text, re.MULTILINE) for text in texts]
    assert headings[0] == headings[1]
    links = [re.findall(r"\]\(([^)\s]+)\)", text) for text in texts]
    # Each links to the other, and the Chinese one to Chinese pages where there are.
    assert links[0][0] == chinese and links[1][0] == english
    assert links[0][1:] == [link.replace(".zh-CN", "") for link in links[1][1:]]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8")) < 9000


def test_commands_are_split_at_lines() -> None:
    text = "# a comment\na \\\n  b\n\ncat >x <<'EOF'\n1\n\n2\nEOF\nc  # why\n"
    assert split(text) == ["a \\\n  b", "cat >x <<'EOF'\n1\n\n2\nEOF", "c  # why"]


def test_links_of_the_docs_point_to_files() -> None:
    broken = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert broken == []


def test_a_command_that_fails_is_reported(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    page = Page(tree, {})
    page.run(Block(("export A=1", "echo b$A")), [])
    page.run(Block(("echo c$A", "false")), ["false"])
    assert page.output == "b1\nc1\n"
    page.run(Block(("false",), fails=True), [])
    with pytest.raises(AssertionError, match="exit status 3"):
        page.run(Block(("exit 3",)), [])
