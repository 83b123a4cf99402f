//! How long the client of a request prefers to wait: `Prefer: wait=N` of RFC 7240.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use std::convert::Infallible;
use std::time::Duration;

/// The wait if a client says nothing.
const DEFAULT: Duration = Duration::from_secs(30);

/// The longest wait, whatever a client says.
const LONGEST: Duration = Duration::from_secs(60);

/// How long an answer may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wait(pub(super) Duration);

impl<S: Send + Sync> FromRequestParts<S> for Wait {
    type Rejection = Infallible;

    /// A preference is none to refuse: one that cannot be read counts as none.
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Wait, Infallible> {
        let headers =
            parts.headers.get_all("prefer").iter().filter_map(|value| value.to_str().ok());
        Ok(Wait(headers.flat_map(|value| value.split(',')).find_map(wait_of).unwrap_or(DEFAULT)))
    }
}

/// The wait that one preference states, if it is one about that.
fn wait_of(preference: &str) -> Option<Duration> {
    let (name, value) = preference.split(';').next()?.split_once('=')?;
    if !name.trim().eq_ignore_ascii_case("wait") {
        return None;
    }
    let seconds = value.trim().trim_matches('"').parse().ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_found_and_bounded() {
        let seconds = |text| wait_of(text).map(|wait| wait.as_secs());
        assert_eq!(seconds("wait=2"), Some(2));
        assert_eq!(seconds(" Wait = \"7\"; x=y"), Some(7));
        assert_eq!(seconds("wait=0"), Some(0));
        assert_eq!(seconds("wait=18446744073709551615"), Some(60));
        for other in ["respond-async", "wait", "wait=", "wait=-1", "waits=2", ""] {
            assert_eq!(wait_of(other), None, "{other}");
        }
    }
}
