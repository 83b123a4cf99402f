//! The cluster in a browser, at the manager's address.
//!
//! Plain HTML, CSS and ES modules that are part of the command: no build step, nothing from any
//! other host, no framework. The page shows the same
//! [`Overview`](crate::watching::overview::Overview) as `hecaton top`, and sends the same requests
//! as the command line. [`POLICY`] lets the pages run only these files, and
//! [`hecaton_web::guarded`] refuses requests from other sites' pages.

use crate::http::api::Manager;
use crate::http::events;
use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// Nothing inline, nothing from elsewhere, in nobody's frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A file of the page.
struct Asset {
    name: &'static str,
    kind: &'static str,
    text: &'static str,
}

macro_rules! assets {
    ($($name:literal: $kind:expr),* $(,)?) => {
        &[$(Asset { name: $name, kind: $kind, text: include_str!(concat!("assets/", $name)) }),*]
    };
}

const SCRIPT: &str = "text/javascript; charset=utf-8";

const ASSETS: &[Asset] = assets![
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "theme.js": SCRIPT,
    "app.js": SCRIPT,
    "live.js": SCRIPT,
    "dom.js": SCRIPT,
    "format.js": SCRIPT,
    "summary.js": SCRIPT,
    "hosts.js": SCRIPT,
    "flows.js": SCRIPT,
    "chart.js": SCRIPT,
    "donors.js": SCRIPT,
    "consumers.js": SCRIPT,
    "alarms.js": SCRIPT,
    "confirm.js": SCRIPT,
    "policy.js": SCRIPT,
];

/// The routes of the dashboard. To be called within a tokio runtime.
pub(crate) fn routes(manager: &Manager) -> Router {
    events::router(manager)
        .route("/", get(|| async { asset("index.html") }))
        .route("/dashboard/{name}", get(|Path(name): Path<String>| async move { asset(&name) }))
}

fn asset(name: &str) -> Response {
    let Some(asset) = ASSETS.iter().find(|asset| asset.name == name) else {
        return (StatusCode::NOT_FOUND, "there is no such file\n").into_response();
    };
    let mut response = asset.text.into_response();
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, asset.kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        // Another version's files would not fit together with this one's.
        (header::CACHE_CONTROL, "no-cache"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_policy::cluster::choice::Choice;
    use hecaton_policy::cluster::targets::{GREEDY_REQUEST_PAGES, tlp};

    fn of_kind(kind: &str) -> impl Iterator<Item = &'static Asset> {
        ASSETS.iter().filter(move |asset| asset.kind.starts_with(kind))
    }

    /// Texts between each `before` and the next double quote.
    fn quoted<'a>(text: &'a str, before: &str) -> Vec<&'a str> {
        let found = text.match_indices(before).map(|(at, _)| &text[at + before.len()..]);
        found.filter_map(|rest| rest.split('"').next()).collect()
    }

    #[test]
    fn the_page_works_offline() {
        for asset in ASSETS {
            let elsewhere: Vec<_> = asset
                .text
                .match_indices("//")
                .map(|(at, _)| &asset.text[at.saturating_sub(6)..asset.text.len().min(at + 30)])
                .filter(|text| text.contains("http") && !text.contains("www.w3.org"))
                .collect();
            assert!(elsewhere.is_empty(), "{} names another host: {elsewhere:?}", asset.name);
        }
    }

    #[test]
    fn the_page_offers_policies_as_they_are_set_without_settings() {
        let script = ASSETS.iter().find(|asset| asset.name == "policy.js").expect("there is one");
        let offered = script.text.split('\'').filter(|text| text.starts_with("{\"policy\""));
        let offered: Vec<Choice> =
            offered.map(|text| serde_json::from_str(text).expect(text)).collect();
        let tlp::Settings { percent, threshold_pages, reserve_pages } = tlp::Settings::default();
        let usual = [
            Choice::GreedyLocal {},
            Choice::GreedyRemote { request_pages: GREEDY_REQUEST_PAGES },
            Choice::Tlp { percent, threshold_pages, reserve_pages },
            Choice::Anticipating {},
        ];
        assert_eq!(offered, usual);
        for choice in usual {
            assert!(script.text.contains(&format!("[\"{}\", ", choice.name())), "{choice}");
        }
    }

    #[test]
    fn the_policy_forbids_nothing_that_the_page_needs() {
        let page = of_kind("text/html").next().expect("there is one").text;
        for inline in ["style=", "onclick", "onload", "<style", "<script>"] {
            assert!(!page.contains(inline), "the page has {inline}");
        }
        for script in of_kind("text/javascript") {
            for inline in ["innerHTML", "outerHTML", "eval(", "setAttribute(\"style\"", "Function("]
            {
                assert!(!script.text.contains(inline), "{} uses {inline}", script.name);
            }
        }
    }

    #[test]
    fn every_file_is_used_and_every_file_that_is_used_is_there() {
        let page = of_kind("text/html").next().expect("there is one").text;
        let mut used: Vec<_> = quoted(page, "\"/dashboard/");
        for script in of_kind("text/javascript") {
            used.extend(quoted(script.text, "from \"./"));
        }
        used.sort_unstable();
        used.dedup();
        let mut there: Vec<_> = ASSETS.iter().map(|asset| asset.name).collect();
        there.retain(|name| *name != "index.html");
        there.sort_unstable();
        assert_eq!(used, there);
    }
}
