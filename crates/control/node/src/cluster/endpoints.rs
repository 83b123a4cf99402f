//! Several addresses of one service, any of which may be the one that answers: written as a list of
//! base URLs with a comma between any two.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Base URLs, and which of them answered last.
#[derive(Debug)]
pub struct Endpoints {
    urls: Vec<String>,
    current: AtomicUsize,
}

/// Outcome of a request to one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tried<T> {
    /// That is the answer.
    Answer(T),
    /// Another one may do better; this is the answer if none does.
    Next(T),
}

/// A text that is no list of base URLs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// One of them is something else.
    #[error("`{url}` is no base URL: write {forms}, with a comma between any two")]
    NotOne {
        /// The rejected part of the list.
        url: String,
        /// The accepted forms.
        forms: String,
    },
    /// They are not reached in the same way.
    #[error(
        "`{0}` is partly http and partly https: what is protected on the way to one would not be on the \
         way to another"
    )]
    Mixed(String),
}

/// Refuses what is no list of base URLs of these schemes (`http`, `https`), or mixes them.
pub fn check_urls(urls: &str, schemes: &[&str]) -> Result<(), UrlError> {
    let is_of = |url: &str, scheme: &str| {
        let rest = url.strip_prefix(scheme).and_then(|rest| rest.strip_prefix("://"));
        let host = rest.map(|rest| rest.trim_end_matches('/'));
        host.is_some_and(|host| !host.is_empty() && !host.contains(['/', '?', '#', ' ', '@']))
    };
    let scheme_of = |url: &str| schemes.iter().position(|scheme| is_of(url, scheme));
    let mut first = None;
    for url in urls.split(',') {
        let Some(scheme) = scheme_of(url) else {
            let forms = schemes.iter().map(|scheme| format!("{scheme}://HOST:PORT"));
            let forms = forms.collect::<Vec<_>>().join(" or ");
            return Err(UrlError::NotOne { url: url.to_owned(), forms });
        };
        if *first.get_or_insert(scheme) != scheme {
            return Err(UrlError::Mixed(urls.to_owned()));
        }
    }
    Ok(())
}

impl Endpoints {
    /// Those in a list with commas, of which there must be one.
    pub fn new(list: &str) -> Endpoints {
        let urls = list.split(',').map(|url| url.trim_end_matches('/').to_owned());
        Endpoints { urls: urls.collect(), current: AtomicUsize::new(0) }
    }

    /// Number of addresses, at least 1.
    pub fn count(&self) -> usize {
        self.urls.len()
    }

    /// Asks the one that answered last, then the others.
    pub fn ask<T>(&self, mut ask: impl FnMut(&str) -> Tried<T>) -> T {
        let first = self.current.load(Ordering::Relaxed);
        let mut steps = 0;
        loop {
            let index = (first + steps) % self.urls.len();
            steps += 1;
            match ask(&self.urls[index]) {
                Tried::Answer(answer) => {
                    self.current.store(index, Ordering::Relaxed);
                    return answer;
                }
                Tried::Next(answer) if steps == self.urls.len() => return answer,
                Tried::Next(_) => {}
            }
        }
    }
}

impl fmt::Display for Endpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.urls.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_checked() {
        let both = ["http", "https"];
        for good in [
            "http://127.0.0.1:7070",
            "https://a:1,https://b:2",
            "http://manager:80/",
            "http://etcd:1/,http://b:2",
            "http://[::1]:1",
            "https://x",
        ] {
            assert_eq!(check_urls(good, &both), Ok(()), "{good}");
        }
        for bad in [
            "http://a:1,",
            "http://a,,http://b",
            "",
            "127.0.0.1:7070",
            "https://",
            "http://",
            "http://a/b",
            "http://user@a",
            "ftp://a",
        ] {
            let error = check_urls(bad, &both).expect_err(bad).to_string();
            assert!(error.contains("http://HOST:PORT or https://HOST:PORT"), "{error}");
        }
        let mixed = check_urls("http://a:1,https://b:1", &both);
        assert_eq!(mixed, Err(UrlError::Mixed("http://a:1,https://b:1".into())));
        assert!(check_urls("https://a:1", &["http"]).is_err(), "not of the schemes there are");
    }

    #[test]
    fn who_answered_last_is_asked_first() {
        let endpoints = Endpoints::new("http://a/,http://b,http://c");
        assert_eq!(endpoints.to_string(), "http://a, http://b, http://c");
        let mut asked = Vec::new();
        let mut ask_until = |answering: &str| {
            asked.clear();
            let answer = endpoints.ask(|url| {
                asked.push(url.to_owned());
                if url == answering { Tried::Answer(true) } else { Tried::Next(false) }
            });
            (answer, asked.len())
        };
        assert_eq!(ask_until("http://b"), (true, 2));
        assert_eq!(ask_until("http://b"), (true, 1));
        assert_eq!(ask_until("http://a"), (true, 3));
        assert_eq!(ask_until("nobody"), (false, 3));
        assert_eq!(ask_until("http://a"), (true, 1), "a round without an answer changes nothing");
    }
}
