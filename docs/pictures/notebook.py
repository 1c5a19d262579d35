"""Takes the two pictures of a notebook: JupyterLab while a cell waits for a worker, and after it.

pip install jupyterlab playwright        # in any environment; it also needs chromium
python docs/pictures/notebook.py PYTHON  # the Python of an environment that has distruntime and ipykernel
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
PORT = 28888
CELLS = [
    "import torch\nimport distruntime as dr\n\n"
    'session = dr.init_master_worker(session="day", world_size=2, simulate_cuda=1)',
    'model = torch.nn.Linear(512, 512).to("remote")\ndr.publish("model", model)\nsession',
    'x = torch.ones(1500, 1500, device="remote")\nfor _ in range(60):\n    y = x @ x\ny.sum().item()',
    "dr.shutdown()",
]


def write(folder: Path, python: str) -> dict[str, str]:
    """Write the notebook and a kernel, and return the environment of the server."""
    cells = [
        {
            "cell_type": "code",
            "source": cell,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
            "id": f"c{k}",
        }
        for k, cell in enumerate(CELLS)
    ]
    kernel = {"name": "there", "display_name": "Python", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "day.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    spec = folder / "share" / "kernels" / "there"
    spec.mkdir(parents=True)
    root = HERE.parents[1]
    paths = {"PYTHONPATH": f"{root}:{root / 'worker'}", "DISTRUNTIME_STATE": str(folder / "state")}
    # The question about news would lie over the notebook.
    settings = folder / ".jupyter/lab/user-settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}', encoding="utf-8")
    argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({**kernel, "argv": argv, "env": paths}), encoding="utf-8")
    return {"JUPYTER_PATH": str(folder / "share"), "HOME": str(folder), "PATH": "/usr/bin:/bin"}


def serve(folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    options = [
        f"--port={PORT}",
        "--no-browser",
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={folder}",
    ]
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--allow-root", *options], env=environment, cwd=folder
    )
    for _ in range(120):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/api", timeout=1).close()
            break
        except OSError:
            time.sleep(0.5)
    return server


def run(page: Page, until: str) -> None:
    """Run the current cell and go to the next one; wait until a text is there."""
    page.keyboard.press("Shift+Enter")
    page.get_by_text(until).first.wait_for(timeout=120_000)


def take(page: Page, name: str) -> None:
    # The bars above the notebook say nothing about it.
    panel = page.locator(".jp-Notebook").bounding_box()
    assert panel is not None
    clip = {"x": panel["x"], "y": panel["y"], "width": panel["width"], "height": 710.0}
    page.screenshot(path=HERE / name, clip=clip)


def main() -> None:
    with tempfile.TemporaryDirectory() as name, sync_playwright() as play:
        folder = Path(name)
        server = serve(folder, write(folder, sys.argv[1]))
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1190, "height": 900})
        try:
            page.goto(f"http://127.0.0.1:{PORT}/doc/tree/day.ipynb")
            page.locator(".jp-Cell .cm-content").first.click(timeout=60_000)
            run(page, "new tensors go to")
            run(page, "262.7 K parameters")
            run(page, "operations under way")
            # By then there is an estimate of how long the rest takes.
            page.get_by_text("left (").first.wait_for(timeout=60_000)
            take(page, "notebook-wait.png")
            page.get_by_text("waited ").first.wait_for(timeout=300_000)
            page.wait_for_timeout(1000)
            take(page, "notebook-session.png")
            page.keyboard.press("Shift+Enter")
            page.wait_for_timeout(5000)
        finally:
            browser.close()
            server.terminate()
            server.wait(20)


if __name__ == "__main__":
    main()
