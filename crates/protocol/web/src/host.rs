//! Parses a `Host` header, or the authority of a request: RFC 9110, 7.2 and 4.2.

use std::net::{IpAddr, Ipv6Addr};

/// `uri-host [ ":" port ]`, whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Host {
    /// An address, which no name can be bound to.
    Address(IpAddr),
    /// A name in lower case, without the dot of its root.
    Name(String),
}

impl Host {
    /// `None` for what is neither: a user before it, a port that is no number, characters that
    /// names do not have, anything left over.
    pub(crate) fn parse(text: &str) -> Option<Host> {
        if let Some(rest) = text.strip_prefix('[') {
            let (address, port) = rest.split_once(']')?;
            let address: Ipv6Addr = address.parse().ok()?;
            return is_port(port).then_some(Host::Address(address.into()));
        }
        let end = text.find(':').unwrap_or(text.len());
        let (name, port) = text.split_at(end);
        let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
        if name.is_empty() || !name.bytes().all(is_of_name) || !is_port(port) {
            return None;
        }
        if let Ok(address) = name.parse() {
            return Some(Host::Address(address));
        }
        let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        (!name.is_empty()).then_some(Host::Name(name))
    }
}

/// Nothing, or a colon and a port; RFC 3986 allows it to be empty.
fn is_port(text: &str) -> bool {
    let Some(digits) = text.strip_prefix(':') else { return text.is_empty() };
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number && (digits.is_empty() || digits.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_names_are_parsed_whole() {
        let address = |text: &str| Some(Host::Address(text.parse().unwrap()));
        let name = |text: &str| Some(Host::Name(text.to_owned()));
        for (text, expected) in [
            ("127.0.0.1", address("127.0.0.1")),
            ("127.0.0.1:7070", address("127.0.0.1")),
            ("[::1]", address("::1")),
            ("[::1]:7070", address("::1")),
            ("localhost:", name("localhost")),
            ("LocalHost.:80", name("localhost")),
            ("a-b.example:65535", name("a-b.example")),
        ] {
            assert_eq!(Host::parse(text), expected, "{text}");
        }
    }

    #[test]
    fn what_is_left_over_is_refused() {
        for text in [
            "",
            ".",
            ":80",
            "[x]",
            "[::1",
            "[::1]evil.com",
            "[::1]:80.evil",
            "[::1]:80:80",
            "::1",
            "127.0.0.1:evil.com",
            "127.0.0.1:65536",
            "127.0.0.1:+80",
            "localhost:80@evil",
            "user@localhost",
            "localhost/path",
            "local host",
            "localhost\u{212a}",
        ] {
            assert_eq!(Host::parse(text), None, "{text}");
        }
    }
}
