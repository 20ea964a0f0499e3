"""What the scripts around `baton-bench serve` share: a table on a page, and a report that `baton-bench compare` reads.

The form of reports is proxy/bench/src/report/record.rs's. Machine, date and Baton's versions are those of a report of the same run.
"""
import json
import os
import re
import statistics
from pathlib import Path


class Results:
    """The results of a script: figures by round, and lines of a table."""

    def __init__(self, bench, title, of, versions):
        """`of` is a report of the same run, `versions` those of other programs, as NAME=VERSION."""
        head = json.loads(Path(of).read_text())
        self.record = {key: head[key] for key in ("baton_bench", "machine", "versions")}
        self.record |= {"bench": bench, "title": title, "date": head["date"], "state": "complete", "figures": []}
        self.record["versions"] |= dict(version.split("=", 1) for version in versions)
        self.lines = []

    def figure(self, name, unit, better, rounds):
        self.record["figures"].append({"name": name, "unit": unit, "better": better, "rounds": list(rounds)})

    def row(self, *cells):
        self.lines.append("| " + " | ".join(cells) + " |")

    def head(self, *cells):
        self.row("", *cells)
        self.lines.append("|---" * (len(cells) + 1) + "|")

    def text(self, line):
        self.lines += ["", line]

    def about(self):
        """Date, machine and versions, as the program's own pages have them."""
        machine = self.record["machine"]
        versions = "".join(f"; {name} {version}" for name, version in sorted(self.record["versions"].items()))
        return (f"{self.record['date']}; {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
                f"{machine['system']}{versions}.")

    def publish(self, target):
        """Prints the table. RESULTS_PAGE gets it between the marks of `make TARGET`, with a report beside it; RESULTS_JSON gets
        the report alone."""
        text = "\n".join([*self.lines, "", self.about()])
        print("\n" + text)
        report = json.dumps(self.record, indent=2, ensure_ascii=False) + "\n"
        if page := os.environ.get("RESULTS_PAGE"):
            path = Path(page)
            begin, end = f"<!-- written by `make {target}`: begin -->", "<!-- end -->"
            marked = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.S)
            written, n = marked.subn(lambda _: f"{begin}\n\n{text}\n\n{end}", path.read_text(), count=1)
            if n == 0:
                raise SystemExit(f"{page} has no part that is marked for `make {target}`")
            path.write_text(written)
            path.with_name(f"{target}.json").write_text(report)
        if file := os.environ.get("RESULTS_JSON"):
            Path(file).write_text(report)


class Loads:
    """The reports of `baton-bench serve` in a folder, by the name of their load."""

    def __init__(self, folder):
        files = sorted(Path(folder).glob("*.json"))
        self.runs = {file.stem: json.loads(file.read_text())["details"] for file in files}
        self.any = files[0]

    def __contains__(self, load):
        return load in self.runs

    def rounds(self, load, server):
        return next(found["rounds"] for found in self.runs[load]["servers"] if found["name"] == server)

    def percentile(self, load, name):
        """A function that gives this percentile of a kind of latency, in milliseconds, in a round of this load."""
        index = self.runs[load]["percentiles"].index(name)
        return lambda figures, kind: figures["latencies"][kind]["percentiles_ms"][index]


def shown(values, digits):
    return f"{statistics.median(values):,.{digits}f}"
