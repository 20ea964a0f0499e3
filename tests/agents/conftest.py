"""Says for each tool which version passed or failed, with which model."""

import re

RESULTS = []


def pytest_runtest_logreport(report):
    if report.when == "call" or report.failed:
        version = dict(report.user_properties).get("version", report.nodeid)
        model = "".join(re.findall(r"\[.*\]$", report.nodeid))
        RESULTS.append((f"{version} {model}", report))


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("versions")
    for version, report in RESULTS:
        terminalreporter.write_line(f"{report.outcome}: {version}, {report.duration:.0f} s")
