//! Reports for a browser: one file each, no script, nothing fetched.

pub(crate) mod plot;

use anyhow::Context as _;
use plot::{COLOURS, escape};
use std::fmt::Write as _;
use std::path::Path;

/// The colours, where it is light and where it is dark.
const PALETTE: [[&str; COLOURS]; 2] = [
    [
        "#2467b3", "#d9730d", "#2b8a57", "#8a4fb5", "#8fcfa9", "#c9aede", "#cc4258", "#e0bd4a",
        "#dde2e7", "#6b7681",
    ],
    [
        "#6aa9ef", "#f2a154", "#62c48f", "#c49ae6", "#35704f", "#6f5289", "#e27486", "#cfb04e",
        "#303941", "#7d8893",
    ],
];

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1d2126;--soft:#5c6670;--grid:#d9dee3;--back:#fff;--box:#f5f7f9}\
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ec;--soft:#9aa5b1;--grid:#39424c;--back:#15191d;\
--box:#1e242a}}\
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:70rem;\
margin:0 auto;padding:1.5rem}\
h1{font-size:1.6rem;margin:0 0 .3rem}h2{font-size:1.2rem;margin:2.5rem 0 .3rem}\
h3{font-size:.95rem;margin:0 0 .2rem}p{max-width:48rem}.soft{color:var(--soft)}\
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem;margin:.8rem 0}\
th,td{padding:.2rem .5rem;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}\
th:first-child,td:first-child{text-align:left}tr.best td{font-weight:600}\
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(24rem,1fr));gap:.8rem}\
figure{margin:0 0 .8rem;background:var(--box);border-radius:6px;padding:.7rem}\
svg{width:100%;height:auto;display:block}\
.grid{stroke:var(--grid)}.tick{fill:var(--soft);font-size:11px}\
path{fill:none;stroke-width:1.8}.dashed{stroke-width:1.1;stroke-dasharray:4 3}\
.pages{display:grid;grid-template-columns:repeat(auto-fit,minmax(512px,1fr));gap:.8rem}\
.pages figure{padding:0}.pages svg{width:512px}\
.key{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin:0 .3rem 0 .9rem;\
vertical-align:-1px}";

/// A whole page.
pub(crate) fn page(title: &str, body: &str) -> String {
    let title = escape(title);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>{title}</title><style>{STYLE}{}</style></head><body>\n\
         <h1>{title}</h1>\n{body}</body></html>\n",
        colours(),
    )
}

/// A colour, and what it stands for.
pub(crate) fn key(colour: usize, name: &str) -> String {
    format!("<span class=\"key k{colour}\"></span>{}", escape(name))
}

/// A table. Heads are those of [`crate::terminal::table::Table`]; cells are text without markup.
pub(crate) fn table<const N: usize>(
    heads: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
) -> String {
    let mut html = "<div class=\"wide\"><table><tr>".to_owned();
    for head in heads {
        let _ = write!(html, "<th>{}</th>", escape(head.trim_start_matches('>')));
    }
    for cells in rows {
        html += "</tr><tr>";
        cells.iter().for_each(|cell| _ = write!(html, "<td>{}</td>", escape(cell)));
    }
    html + "</tr></table></div>"
}

/// Writes a page to a file.
pub(crate) fn write(file: &Path, page: &str) -> anyhow::Result<()> {
    std::fs::write(file, page)
        .with_context(|| format!("cannot write the report to {}", file.display()))
}

fn colours() -> String {
    let values = |palette: [&str; COLOURS]| {
        let values = palette.iter().enumerate().map(|(at, colour)| format!("--c{at}:{colour};"));
        values.collect::<String>()
    };
    let [light, dark] = PALETTE.map(values);
    let mut style = format!(":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}");
    for at in 0..COLOURS {
        let _ = write!(
            style,
            ".c{at}{{fill:var(--c{at})}}.l{at}{{stroke:var(--c{at})}}.k{at}{{background:var(--c{at})}}"
        );
    }
    style
}

/// Asserts that a page is well-formed and refers to nothing outside, whatever its content.
#[cfg(test)]
pub(crate) fn assert_complete(page: &str) {
    for external in ["src=", "href=", "url(", "@import", "<script"] {
        assert!(!page.contains(external), "the report refers to something: {external}");
    }
    // Well-formed, so that every browser reads it the same.
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    assert!(!page.contains("NaN") && !page.contains("inf"), "a coordinate is not a number");
}
