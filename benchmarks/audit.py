"""A software bill of materials, licences and known vulnerabilities of an environment:
`make audit`.

    .venv-audit/bin/python benchmarks/audit.py .venv/bin/python   writes build/audit

Runs in an environment with cyclonedx-bom, pip-licenses and pip-audit. The exit code is
1 where a licence is one that a library must not depend on, or a version has a known
vulnerability. Without a network no advisory is found: the number of packages that were
compared with advisories is printed.
"""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

OUT = Path(__file__).parent.parent / "build" / "audit"
ALLOWED = (
    r"MIT|Apache|BSD|ISC|PSF|Python"
    r" Software|MPL|Mozilla|Zlib|CC0|HPND|Unlicense|BSL-1|LLVM|0BSD"
)
COPYLEFT = r"\bA?GPL|Affero|GNU General"  # LGPL is allowed: it is linked, not copied


def main() -> None:
    environment, tools = sys.argv[1], Path(sys.executable).parent
    words: list[str | Path]
    OUT.mkdir(parents=True, exist_ok=True)
    bill, licences = OUT / "sbom.json", OUT / "licences.csv"
    words = [
        tools / "cyclonedx-py",
        "environment",
        environment,
        "--output-format",
        "JSON",
        "-o",
        bill,
    ]
    subprocess.run(words, check=True)
    words = [
        tools / "pip-licenses",
        "--python",
        environment,
        "--format=csv",
        "--output-file",
        licences,
    ]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    place = subprocess.run(
        [environment, "-c", asked], check=True, capture_output=True, text=True
    ).stdout.strip()
    words = [
        tools / "pip-audit",
        "--path",
        place,
        "--format",
        "json",
        "--progress-spinner",
        "off",
    ]
    told = subprocess.run(words, check=False, capture_output=True, text=True)
    (OUT / "vulnerabilities.json").write_text(told.stdout or "{}")
    found = json.loads(told.stdout or "{}").get("dependencies", [])
    compared = [each for each in found if "skip_reason" not in each]
    vulnerable = [
        f"{each['name']} {each['version']}: {each['vulns'][0]['id']}"
        for each in compared
        if each["vulns"]
    ]
    rows = list(csv.DictReader(licences.open(newline="")))
    odd = [
        f"{row['Name']}: {row['License']}"
        for row in rows
        if not re.search(ALLOWED, row["License"])
    ]
    refused = [
        f"{row['Name']}: {row['License']}"
        for row in rows
        if re.search(COPYLEFT, row["License"])
    ]
    print(f"{len(json.loads(bill.read_text())['components'])} components: {bill}")
    print(
        f"{len(rows)} licences: {licences}; to be read by a person:"
        f" {', '.join(odd) or 'none'}"
    )
    known = f"{len(compared)} of {len(rows)} packages compared with advisories"
    print(f"{known}; vulnerable: {', '.join(vulnerable) or 'none'}")
    if not compared:
        print("no advisory could be reached: run this again with a network")
    raise SystemExit(1 if vulnerable or refused else 0)


if __name__ == "__main__":
    main()
