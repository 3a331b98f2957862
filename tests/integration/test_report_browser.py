"""The report in a real browser: it renders, filters and opens without a network, and runs nothing but itself.

Each test loads a page into a frame of a small harness page, lets a script act on it, and reads what the script
returns from the browser's dump of the harness.
"""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stacklm_hf.evaluation import write_report
from stacklm_hf.protocol.wire import FORMAT_ERROR
from stacklm_hf.rollout.trajectory import Step, StepKind, StopReason, Trajectory

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium binary on the PATH: apt-get install chromium to run this"
)

ATTACK = "document.documentElement.dataset.attacked = 1"
HOSTILE = f"</script><script>{ATTACK}</script><img src=x onerror='{ATTACK}'><!-- <svg onload=\"{ATTACK}\"> \u202e"

CALL = 'Thought: I need it.\n<|tool_call|>{"tool": "search", "args": {"query": "RoPE base", "k": 2}}'

Act = Callable[..., Any]


def episodes(count: int, **fields: Any) -> list[Trajectory]:
    """Every third one is wrong, and holds the attack in all that the model and the world wrote."""
    records = []
    for i in range(count):
        good = i % 3 != 2
        record = Trajectory(
            f"task-{i}/seed0/0",
            f"task-{i}",
            "research",
            ("lookup", "sum")[i % 2],
            f"What is the RoPE base number {i}?" + ("" if good else HOSTILE),
            "10000",
            steps=[
                Step(
                    StepKind.CALL, CALL, "I need it.", "search", '{"query": "RoPE base"}', "[1] The RoPE base is 10000."
                ),
                Step(StepKind.ANSWER, "Thought: x\nAnswer: 10000", answer="10000"),
            ],
            answer="10000",
            correct=good,
            stop_reason=StopReason.ANSWERED,
            system="You are brief.",
            split="heldout",
        )
        if not good:
            wrong = Step(StepKind.MALFORMED, HOSTILE, observation=FORMAT_ERROR)
            record = replace(record, steps=[wrong, Step(StepKind.ANSWER, HOSTILE, answer=HOSTILE)], answer=HOSTILE)
        records.append(replace(record, **fields))
    return records


@pytest.fixture
def act(tmp_path) -> Act:
    """`act(page, script, width)`: runs the script with `page`, its document, and gives what it returns."""

    def run(page: str, script: str, width: int = 1280) -> Any:
        harness = tmp_path / "harness.html"
        harness.write_text(
            f"""<!doctype html><meta charset="utf-8"><pre id="result">nothing came back</pre>
            <iframe id="frame" width="{width}" height="900" srcdoc="{html.escape(page)}"></iframe>
            <script>
            const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
            document.getElementById("frame").addEventListener("load", async () => {{
              const page = document.getElementById("frame").contentDocument;
              const text = (selector) => [...page.querySelectorAll(selector)].map((node) => node.textContent);
              await wait(100);
              let result;
              try {{ result = await (async () => {{ {script} }})(); }} catch (error) {{ result = String(error); }}
              document.getElementById("frame").remove();
              document.getElementById("result").textContent = JSON.stringify(result);
            }});
            </script>""",
            encoding="utf-8",
        )
        command = [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=10000",
            "--dump-dom",
            harness.as_uri(),
        ]
        dump = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        result = dump.split('<pre id="result">')[1].split("</pre>")[0]
        return json.loads(html.unescape(result))

    return run


@pytest.fixture
def report(tmp_path) -> Callable[..., str]:
    def build(runs: dict[str, list[Trajectory]], **options: Any) -> str:
        return write_report(tmp_path / "report.html", runs, **options).read_text(encoding="utf-8")

    return build


ATTACKED = "return page.documentElement.dataset.attacked ?? null;"


def test_the_attack_works_where_nothing_stops_it(act):
    """Shows that the tests below would notice."""
    assert act(f"<!doctype html><body>{HOSTILE}", ATTACKED) == "1"


def test_untrusted_text_never_runs(act, report):
    page = report({HOSTILE: episodes(6, kind=HOSTILE)}, title=HOSTILE, metadata={HOSTILE: HOSTILE})
    result = act(
        page,
        """
        for (const row of page.querySelectorAll(".ep")) row.open = true;
        await wait(100);
        const attacked = page.documentElement.dataset.attacked ?? null;
        return { attacked, images: page.images.length, text: text(".ep .text") };
        """,
    )
    assert (result["attacked"], result["images"]) == (None, 0)
    assert any(HOSTILE in text for text in result["text"])


def test_a_script_that_got_into_the_page_would_not_run(act, report):
    """The second line of defence, its Content-Security-Policy."""
    assert act(report({"a": episodes(3)}).replace("</main>", HOSTILE + "</main>"), ATTACKED) is None


def test_a_long_list_is_built_page_by_page(act, report):
    result = act(
        report({"after SFT": episodes(2100)}),
        """
        const rows = () => page.querySelectorAll(".ep").length;
        const first = rows();
        const more = page.getElementById("more");
        const label = more.textContent;
        more.click();
        return { first, label, then: rows(), count: text("#count"), notice: text(".notice"),
                 focus: [...page.querySelectorAll(".ep > summary")].indexOf(page.activeElement),
                 built: page.querySelectorAll(".ep .text").length };
        """,
    )
    assert (result["first"], result["then"], result["built"]) == (50, 100, 0)
    assert result["label"] == "Show 50 more of 1950"
    assert result["count"] == ["2,000 of 2,000 trajectories"]
    assert "Listed here: 2,000 of 2,100 trajectories" in result["notice"][0]
    assert result["focus"] == 50  # the keyboard goes on where the new rows begin


def test_filters_by_outcome_run_shape_and_text(act, report):
    result = act(
        report({"before SFT": episodes(30), "after SFT": episodes(60)}),
        """
        const form = page.getElementById("filters").elements;
        const count = async (fields) => {
          page.getElementById("filters").reset();
          await wait(50);
          for (const [name, value] of Object.entries(fields)) form[name].value = value;
          form.q.dispatchEvent(new Event("input", { bubbles: true }));
          await wait(300);
          return text("#count")[0].split(" ")[0];
        };
        const out = {
          all: await count({}), correct: await count({ outcome: "correct" }),
          failed: await count({ outcome: "failed" }), malformed: await count({ outcome: "malformed" }),
          run: await count({ run: "1" }), sum: await count({ kind: "sum" }),
          both: await count({ run: "0", kind: "sum" }), words: await count({ q: "BASE number 17?" }),
          observation: await count({ q: "[1] The RoPE base is" }), nothing: await count({ q: "no such text" }),
        };
        page.querySelector("[data-outcome=malformed]").click();
        await wait(300);
        return { ...out, by_chart: text("#count")[0].split(" ")[0], badges: [...new Set(text(".badge"))] };
        """,
    )
    assert result == {
        "all": "90",
        "correct": "60",
        "failed": "30",
        "malformed": "30",
        "run": "60",
        "sum": "45",
        "both": "15",
        "words": "2",
        "observation": "60",
        "nothing": "0",
        "by_chart": "30",
        "badges": ["✗ malformed"],
    }


def test_one_task_can_be_followed_through_the_runs(act, report):
    result = act(
        report({"before SFT": episodes(20), "after SFT": episodes(20)}),
        """
        const row = page.querySelectorAll(".ep")[1];
        row.open = true;
        await wait(100);
        const link = row.querySelector("a").getAttribute("href");
        row.querySelector(".tools button").click();
        await wait(300);
        return { count: text("#count")[0], runs: text(".ep .sub bdi:first-child"), link };
        """,
    )
    # task-1 only, not task-10 to task-19
    assert result["count"] == "2 of 40 trajectories (of the task task-1)"
    assert result["runs"] == ["before SFT", "after SFT"]
    assert result["link"] == "#run=0&episode=task-1%2Fseed0%2F0"


def test_a_link_to_an_episode_opens_it(act, report):
    page = report({"before SFT": episodes(20), "after SFT": episodes(20)})
    # What a click on the link does; in this frame, whose links count from the harness, it takes a script.
    result = act(
        page,
        """
        page.defaultView.location.hash = "#run=1&episode=task-7%2Fseed0%2F0";
        await wait(300);
        const open = page.querySelectorAll(".ep[open] .text").length;
        return { count: text("#count")[0], open, run: text(".ep bdi")[1] };
        """,
    )
    assert result["count"] == "1 of 40 trajectories (one linked episode)"
    assert (result["open"], result["run"]) == (5, "after SFT")


def test_an_episode_shows_who_wrote_what(act, report):
    result = act(
        report({"after SFT": episodes(1)}),
        """
        page.querySelector(".ep").open = true;
        await wait(100);
        return { own: text("mark.own:not(.key *)"), world: text(".ep .plain"), who: text(".ep .who") };
        """,
    )
    assert result["who"] == ["System", "Question", "Model", "Tool result", "Model"]
    assert result["own"] == [*CALL.split("<|tool_call|>"), "Thought: x\nAnswer: 10000"]
    assert "[1] The RoPE base is 10000." in result["world"]


@pytest.mark.parametrize("width", [390, 1280])
def test_fits_the_width_of_a_phone_and_of_a_desk(act, report, width):
    log = [{"step": step, "loss": 1 / step, "heldout_accuracy": 0.5} for step in range(1, 30)]
    page = report(
        {"before SFT": episodes(9, correct=False), "after SFT": episodes(9)}, title="word" * 40, training_log=log
    )
    result = act(
        page,
        """
        for (const row of page.querySelectorAll(".ep")) row.open = true;
        await wait(100);
        return { wide: page.documentElement.scrollWidth, shown: page.documentElement.clientWidth };
        """,
        width,
    )
    assert result["wide"] <= result["shown"] <= width


def test_every_control_has_a_name_and_every_figure_a_text(act, report):
    nameless = act(
        report({"before SFT": episodes(3), "after SFT": episodes(3)}, training_log=[{"step": 1, "loss": 1.0}]),
        """
        const named = (node) => node.textContent.trim() || node.getAttribute("aria-label") || node.closest("label");
        const controls = [...page.querySelectorAll("button, select, input, summary, a")].filter((node) => !node.hidden);
        const figures = [...page.querySelectorAll("svg:not(svg svg)")];
        return {
          controls: controls.filter((node) => !named(node)).map((node) => node.outerHTML),
          figures: figures.filter((node) => !node.ariaLabel && !node.ariaHidden).map((node) => node.outerHTML),
          seen: [controls.length > 10, figures.length > 5],
        };
        """,
    )
    assert nameless == {"controls": [], "figures": [], "seen": [True, True]}
