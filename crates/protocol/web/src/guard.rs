//! Rejects cross-site and DNS-rebinding requests from browsers.
//!
//! A browser sends requests to any address that a page names, loopback and the inner network
//! included. Two ways of misusing that are closed here, for all routes of a server:
//!
//! - *Cross-site requests.* A request that changes something and says where it comes from
//!   (`Origin`, which browsers always send with such requests, or `Sec-Fetch-Site`) must come from
//!   the server's own page, and be JSON, which no HTML form can send. Programs say neither, and
//!   pass.
//! - *DNS rebinding.* A page whose own name was made to point here is of the same site for the
//!   browser. But its requests name that site as their `Host`. On loopback, `Host` must be an
//!   address, `localhost`, this machine's name or another name of the server's (one in its
//!   certificate), which a browser takes for no other name. Elsewhere, where programs may know the
//!   server by a name of any kind, that is asked of requests from browsers that change something.
//!
//! A request whose host cannot be parsed is refused everywhere.

use crate::host::Host;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use std::net::SocketAddr;
use std::sync::Arc;

/// Whether a name in lower case is another one of the server's.
type IsOwn = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// Where a server listens, and its names.
#[derive(Clone)]
struct Guard {
    is_loopback: bool,
    own_name: String,
    is_own: IsOwn,
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Refusal {
    #[error("the request names no host")]
    NoHost,
    #[error(
        "`{0}` is not a name that this server answers to: use its address, `localhost`, the name \
         of its machine, or one that its certificate has"
    )]
    Host(String),
    #[error("a page of `{0}` may not change anything here")]
    Origin(String),
    #[error("a request from a page must be application/json")]
    ContentType,
}

impl Guard {
    fn new(address: SocketAddr, is_own: IsOwn) -> Guard {
        let own_name = rustix::system::uname().nodename().to_string_lossy().to_lowercase();
        Guard { is_loopback: address.ip().is_loopback(), own_name, is_own }
    }

    fn admit(
        &self,
        method: &Method,
        host: Option<&str>,
        headers: &HeaderMap,
    ) -> Result<(), Refusal> {
        let host = host.ok_or(Refusal::NoHost)?;
        let not_ours = || Refusal::Host(host.to_owned());
        let is_own = self.is_own(&Host::parse(host).ok_or_else(not_ours)?);
        if self.is_loopback && !is_own {
            return Err(not_ours());
        }
        if matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS) {
            return Ok(());
        }
        let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
        if let Some(site @ ("cross-site" | "same-site")) = text("sec-fetch-site") {
            return Err(Refusal::Origin(text("origin").unwrap_or(site).to_owned()));
        }
        let Some(origin) = text("origin") else { return Ok(()) };
        // The scheme is not compared: there is one server at this host and port.
        let is_here = origin.split_once("://").is_some_and(|(_, at)| at.eq_ignore_ascii_case(host));
        if !is_here {
            return Err(Refusal::Origin(origin.to_owned()));
        }
        if !is_own {
            return Err(not_ours());
        }
        let kind = text(header::CONTENT_TYPE.as_str()).unwrap_or_default();
        let kind = kind.split(';').next().unwrap_or_default().trim();
        match kind.eq_ignore_ascii_case("application/json") {
            true => Ok(()),
            false => Err(Refusal::ContentType),
        }
    }

    /// Whether nobody else's name can be this host: addresses cannot be rebound, and by a name that
    /// is not the server's no browser comes here.
    fn is_own(&self, host: &Host) -> bool {
        match host {
            Host::Address(_) => true,
            Host::Name(name) => {
                name == "localhost" || *name == self.own_name || (self.is_own)(name)
            }
        }
    }
}

/// Routes of a server on this address, with the guard before them. `is_own` tells of a name in
/// lower case whether it is one of the server's.
pub fn guarded(
    routes: Router,
    address: SocketAddr,
    is_own: impl Fn(&str) -> bool + Send + Sync + 'static,
) -> Router {
    routes.layer(from_fn_with_state(Guard::new(address, Arc::new(is_own)), check))
}

/// Lets a request pass, or says why not.
async fn check(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    let authority = request.uri().authority().map(|authority| authority.as_str());
    let named = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    match guard.admit(request.method(), authority.or(named), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refusal) => {
            let status = match refusal {
                Refusal::NoHost => StatusCode::BAD_REQUEST,
                Refusal::Host(_) => StatusCode::MISDIRECTED_REQUEST,
                Refusal::Origin(_) => StatusCode::FORBIDDEN,
                Refusal::ContentType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            };
            (status, format!("{refusal}\n")).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::{HeaderName, HeaderValue};

    fn guard(is_loopback: bool) -> Guard {
        named(is_loopback, "")
    }

    /// A server that has this name, too.
    fn named(is_loopback: bool, name: &'static str) -> Guard {
        let is_own: IsOwn = Arc::new(move |host| host == name);
        Guard { is_loopback, own_name: "m1".to_owned(), is_own }
    }

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn on_loopback_only_names_that_cannot_be_rebound_are_answered_to() {
        let admit = |host| guard(true).admit(&Method::GET, Some(host), &HeaderMap::new());
        for good in
            ["127.0.0.1:7070", "localhost", "LocalHost:1", "localhost.", "[::1]:7070", "m1:80"]
        {
            assert_eq!(admit(good), Ok(()), "{good}");
        }
        for bad in [
            "evil.example:7070",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "",
            "[x",
            "[::1]evil.com",
            "127.0.0.1:evil.com",
            "[::1]:80.evil",
            "localhost:80@evil",
        ] {
            assert_eq!(admit(bad), Err(Refusal::Host(bad.to_owned())), "{bad}");
        }
        assert_eq!(guard(true).admit(&Method::GET, None, &HeaderMap::new()), Err(Refusal::NoHost));
    }

    #[test]
    fn elsewhere_nodes_may_use_any_name_and_pages_may_not() {
        let guard = guard(false);
        let none = HeaderMap::new();
        assert_eq!(guard.admit(&Method::POST, Some("manager.example:7070"), &none), Ok(()));
        let odd = guard.admit(&Method::GET, Some("manager.example:x"), &none);
        assert_eq!(odd, Err(Refusal::Host("manager.example:x".to_owned())));
        let page = headers(&[
            ("origin", "http://evil.example:7070"),
            ("content-type", "application/json"),
        ]);
        let rebound = guard.admit(&Method::POST, Some("evil.example:7070"), &page);
        assert_eq!(rebound, Err(Refusal::Host("evil.example:7070".to_owned())));
    }

    #[test]
    fn other_names_of_the_server_are_its_own() {
        for is_loopback in [true, false] {
            let guard = named(is_loopback, "manager.example");
            let put = |host: &'static str, origin: &'static str| {
                let page = headers(&[("origin", origin), ("content-type", "application/json")]);
                guard.admit(&Method::PUT, Some(host), &page)
            };
            assert_eq!(put("manager.example:7070", "https://manager.example:7070"), Ok(()));
            assert_eq!(put("Manager.Example.", "https://manager.example."), Ok(()));
            assert_eq!(put("m1:7070", "https://m1:7070"), Ok(()), "as without");
            for (host, origin) in [
                ("evil.example", "https://evil.example"),
                ("manager.example.evil.example", "https://manager.example.evil.example"),
                ("example", "https://example"),
            ] {
                assert_eq!(put(host, origin), Err(Refusal::Host(host.to_owned())), "{host}");
            }
            // Another page's request to a name that is its own.
            let other = put("manager.example", "https://evil.example");
            assert_eq!(other, Err(Refusal::Origin("https://evil.example".to_owned())));
        }
    }

    #[test]
    fn other_sites_pages_change_nothing() {
        let admit =
            |pairs: &[_]| guard(true).admit(&Method::POST, Some("localhost:7070"), &headers(pairs));
        let own = ("origin", "http://localhost:7070");
        let json = ("content-type", "application/json; charset=utf-8");
        assert_eq!(admit(&[own, json]), Ok(()));
        assert_eq!(admit(&[own, json, ("sec-fetch-site", "same-origin")]), Ok(()));
        assert_eq!(admit(&[]), Ok(()), "a program");
        for origin in ["http://evil.example", "null", "http://localhost:7071", "http://localhost"] {
            let refused = Err(Refusal::Origin(origin.to_owned()));
            assert_eq!(admit(&[("origin", origin), json]), refused, "{origin}");
        }
        let other_port = admit(&[("sec-fetch-site", "same-site")]);
        assert_eq!(other_port, Err(Refusal::Origin("same-site".to_owned())));
        for form in ["text/plain", "application/x-www-form-urlencoded", ""] {
            let refused = admit(&[own, ("content-type", form)]);
            assert_eq!(refused, Err(Refusal::ContentType), "{form}");
        }
        assert_eq!(admit(&[own]), Err(Refusal::ContentType));
    }
}
