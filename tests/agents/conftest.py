"""Says for each tool which version passed or failed."""

RESULTS = []


def pytest_runtest_logreport(report):
    if report.when == "call" or report.failed:
        RESULTS.append((dict(report.user_properties).get("version", report.nodeid), report))


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("versions")
    for version, report in RESULTS:
        terminalreporter.write_line(f"{report.outcome}: {version}, {report.duration:.0f} s")
