"""Writes the plain manifests beside this file: the chart, rendered by Helm with its default values, in both layouts.

python deploy/kubernetes/render.py                      write the manifests
python deploy/kubernetes/render.py --package FOLDER     write the chart as a package, with rules and dashboards in it

Needs helm-python-sdk, which is Helm itself as a library.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LAYOUTS = {"one-pod.yaml": {"layout": "pod"}, "node-daemon.yaml": {"layout": "node"}}


def bundle(folder: Path) -> Path:
    """The chart with the repository's rules and dashboards in it, as a chart can have no files from outside."""
    chart = folder / "readmit"
    shutil.copytree(ROOT / "deploy" / "helm" / "readmit", chart)
    for name, pattern in (("alerts", "readmit.*.yaml"), ("dashboards", "*.json")):
        (chart / "files" / name).mkdir(parents=True)
        for file in sorted((ROOT / name).glob(pattern)):
            shutil.copy(file, chart / "files" / name)
    (chart / "files" / "README.md").write_text("Copied from alerts/ and dashboards/ of the repository.\n")
    return chart


def rendered(values: dict[str, Any], chart: Path) -> str:
    """All manifests of a chart, in one text."""
    from helm_python import Chart

    with Chart.load(chart) as loaded:
        parts = loaded.render(values=values, name="readmit", namespace="default")
    manifests = (text.strip() for path, text in sorted(parts.items()) if path.endswith(".yaml"))
    return "\n---\n".join(text for text in manifests if text) + "\n"


def main() -> None:
    from helm_python import Chart

    with tempfile.TemporaryDirectory() as folder:
        chart = bundle(Path(folder))
        if sys.argv[1:2] == ["--package"]:
            with Chart.load(chart) as loaded:
                print(loaded.save(sys.argv[2]))
            return
        for name, values in LAYOUTS.items():
            (HERE / name).write_text(rendered(values, chart))


if __name__ == "__main__":
    main()
