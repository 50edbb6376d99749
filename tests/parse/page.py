#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks pages in a headless Chromium.

usage: page.py PAGE:PLOTS...

Each page, 1280 and 390 pixels wide, light and dark: no message on the console, at least PLOTS plots and groups of bars that are
drawn (elements with a size, all inside of their picture, text of at least 9 pixels, none over another), nothing wider than the
page and nothing to scroll sideways, no cell that is cut, a title of its own, colours that differ between light and dark. Exit
code 77: there is no Chromium.
"""
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTHS = (1280, 390)  # a laptop and a phone; Chromium has no window as narrow as that, but a frame in a page can be

PROBE = """<script>
addEventListener('load', () => {
  document.querySelectorAll('details').forEach(e => e.open = true);
  const inside = (e, box) => { const b = e.getBoundingClientRect(); return b.left >= box.left - 1 && b.right <= box.right + 1 &&
    b.top >= box.top - 1 && b.bottom <= box.bottom + 1; };
  const svgs = [...document.querySelectorAll('figure svg')];
  const plots = svgs.filter(svg => {
    const box = svg.getBoundingClientRect();
    const marks = [...svg.querySelectorAll('circle')].filter(m => m.getBoundingClientRect().height > 0);
    return box.width > 100 && box.height > 60 && marks.length > 1;
  }).length + [...document.querySelectorAll('figure dl')].filter(bars => bars.getBoundingClientRect().height > 60 &&
    [...bars.querySelectorAll('dd')].some(e => parseFloat(getComputedStyle(e, '::before').width) > 30)).length;
  const name = e => e.tagName + ' ' + e.textContent.slice(0, 30);
  const cut = svgs.flatMap(svg => [...svg.querySelectorAll('text,circle')].filter(e => !inside(e, svg.getBoundingClientRect()))
    .map(name)).concat([...document.querySelectorAll('td,th,pre,p,li,dt,dd')].filter(e => e.scrollWidth > e.clientWidth + 1 &&
    getComputedStyle(e).display != 'inline').map(name)).slice(0, 5);
  const near = svgs.flatMap(svg => [...svg.querySelectorAll('text')].map((e, i, all) => [e, all.slice(i + 1).find(o => {
    const a = e.getBoundingClientRect(), b = o.getBoundingClientRect();
    return a.left < b.right + 1 && b.left < a.right + 1 && a.top < b.bottom + 1 && b.top < a.bottom + 1; })])
    .filter(pair => pair[1]).map(pair => name(pair[0]) + ' over ' + name(pair[1]))).slice(0, 5);
  const wide = [...document.body.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)
    .map(name).slice(0, 5);
  const small = svgs.filter(svg => 12 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width < 9).length;
  const text = document.querySelector('svg text');
  parent.postMessage({page: location.hash.slice(1), plots, cut, near, wide, small, title: document.title, width: innerWidth,
    scroll: document.documentElement.scrollWidth, background: getComputedStyle(document.body).backgroundColor,
    text: text ? getComputedStyle(text).fill : ''}, '*');
});
</script>"""

FRAMES = """<!DOCTYPE html><body><script>
const seen = [];
addEventListener('message', event => { seen.push(event.data); document.title = 'seen ' + JSON.stringify(seen); });
</script>"""


def chromium():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            return shutil.which(name)
    print("there is no Chromium here")
    sys.exit(77)


def look(browser, pages, folder, dark):
    frames = FRAMES
    for i, page in enumerate(pages):
        probed = folder / f"{i}.html"
        probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8")
        frames += "".join(f'<iframe src="file://{probed}#{i}" width="{width}" height="900" style="border:0"></iframe>'
                          for width in WIDTHS)
    (folder / "frames.html").write_text(frames + "</body>", encoding="utf-8")
    seen = subprocess.run(
        [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         "--enable-logging=stderr", "--no-first-run", "--disable-extensions", f"--user-data-dir={folder}/profile",
         "--window-size=1400,1000", f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=20000",
         "--dump-dom", f"file://{folder}/frames.html"], capture_output=True, text=True, timeout=240, check=True)
    messages = [line for line in seen.stderr.splitlines() if "CONSOLE" in line]
    assert not messages, messages
    found = re.search(r"<title>seen (.*?)</title>", seen.stdout, re.DOTALL)
    assert found, "no page loaded"
    return sorted(json.loads(html.unescape(found.group(1))), key=lambda one: (int(one["page"]), -one["width"]))


def main():
    browser = chromium()
    pages = [Path(argument.rpartition(":")[0]).resolve() for argument in sys.argv[1:]]
    plots = [int(argument.rpartition(":")[2]) for argument in sys.argv[1:]]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        both = [look(browser, pages, Path(folder), dark) for dark in (False, True)]
    for light, dark in zip(*both):
        print(pages[int(light["page"])], light)
        for seen in (light, dark):
            assert seen["plots"] >= plots[int(seen["page"])] and not seen["small"], seen
            assert not seen["wide"] and not seen["cut"] and not seen["near"] and seen["scroll"] <= seen["width"], seen
        assert light["background"] != dark["background"] and (light["text"] != dark["text"] or not light["plots"])
    assert [len(one) for one in both] == [len(WIDTHS) * len(pages)] * 2, "not every page loaded"
    assert len({seen["title"] for seen in both[0]}) == len(pages), "titles that are the same"


if __name__ == "__main__":
    main()
