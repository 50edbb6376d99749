#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks a report in a headless Chromium.

usage: page.py PAGE OUT [PLOTS]

Light, dark, and as wide as a phone: no message on the console, at least PLOTS plots that are drawn (elements with a size,
inside of their figure), nothing wider than the page except scrollable elements, colours that differ between light and
dark. Screenshots go to OUT. Exit code 77: there is no Chromium.
"""
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROBE = """<script>
addEventListener('load', () => {
  const plots = [...document.querySelectorAll('figure svg')].filter(svg => {
    const box = svg.getBoundingClientRect();
    const marks = [...svg.querySelectorAll('rect,circle')].filter(m => m.getBoundingClientRect().height > 0);
    return box.width > 100 && box.height > 60 && marks.length > 1;
  }).length;
  const colour = getComputedStyle(document.body);
  const wide = [...document.body.querySelectorAll('*')].filter(e => !e.closest('.scroll,.plot,pre') &&
    e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName).slice(0, 5);
  const text = document.querySelector('svg text');
  document.title = 'probe ' + JSON.stringify({plots, wide, width: innerWidth, scroll: document.documentElement.scrollWidth,
    background: colour.backgroundColor, text: text ? getComputedStyle(text).fill : ''});
});
</script>"""


def chromium():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            return shutil.which(name)
    print("there is no Chromium here")
    sys.exit(77)


def look(browser, page, out, name, size, dark, profile):
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
               "--enable-logging=stderr", "--no-first-run", "--disable-extensions", f"--user-data-dir={profile}",
               f"--window-size={size}", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    # The page with the probe reports, the page without is what a reader gets.
    probed = Path(profile) / "probed.html"
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8")
    told = subprocess.run(command + ["--dump-dom", f"file://{probed}"], capture_output=True, text=True, timeout=120,
                          check=True)
    seen = subprocess.run(command + [f"--screenshot={out}/{name}.png", f"file://{page.resolve()}"], capture_output=True,
                          text=True, timeout=120, check=True)
    messages = [line for line in (told.stderr + seen.stderr).splitlines() if "CONSOLE" in line]
    assert not messages, messages
    found = re.search(r"<title>probe (.*?)</title>", told.stdout)
    assert found, "the page did not load"
    return json.loads(found.group(1).replace("&lt;", "<").replace("&amp;", "&"))


def main():
    browser, page, out = chromium(), Path(sys.argv[1]), Path(sys.argv[2])
    plots = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        light = look(browser, page, out, "light", "1100,1800", False, profile)
        dark = look(browser, page, out, "dark", "1100,1800", True, profile)
        # Chromium has no window narrower than 500.
        phone = look(browser, page, out, "phone", "500,1800", False, profile)
    print(light, dark, phone, sep="\n")
    for seen in (light, dark, phone):
        assert seen["plots"] >= plots, seen
        assert not seen["wide"] and seen["scroll"] <= seen["width"], seen
    assert light["background"] != dark["background"] and light["text"] != dark["text"]


if __name__ == "__main__":
    main()
