//! Encodes the token with which a host joins a cluster.
//! It holds the authority's address and fingerprint, and a secret that the authority knows.

use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;
use std::str::FromStr;

/// Prefix of every token. Raise its number when the form of tokens changes.
const FORM: &str = "hecaton1";

/// Bytes of a secret, and of a SHA-256.
const BYTES: usize = 32;

/// A token. As text: `hecaton1.SECRET.FINGERPRINT@HOST:PORT`.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    secret: [u8; BYTES],
    authority: [u8; BYTES],
    at: String,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Nothing secret.
        f.debug_struct("Token").field("at", &self.at).finish_non_exhaustive()
    }
}

/// A text that is no token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is no token: one of `hecaton pki token` begins with {FORM} and ends with @HOST:PORT")]
pub struct NoToken;

impl Token {
    /// A token with a new secret for the authority with this certificate (DER), reached at `at`.
    pub(crate) fn draw(authority: &[u8], at: &str) -> Result<Token, ring::error::Unspecified> {
        let mut secret = [0; BYTES];
        SystemRandom::new().fill(&mut secret)?;
        Ok(Token { secret, authority: sha256(authority), at: at.to_owned() })
    }

    /// The secret in hexadecimal, as the host shows it to the authority.
    pub(crate) fn secret(&self) -> String {
        hex(&self.secret)
    }

    /// Whether this certificate (DER) is the authority's.
    pub(crate) fn names(&self, certificate: &[u8]) -> bool {
        self.authority == sha256(certificate)
    }

    /// The authority's address: a host and a port.
    pub fn at(&self) -> &str {
        &self.at
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{FORM}.{}.{}@{}", hex(&self.secret), hex(&self.authority), self.at)
    }
}

impl FromStr for Token {
    type Err = NoToken;

    fn from_str(text: &str) -> Result<Token, NoToken> {
        let (front, at) = text.trim().split_once('@').ok_or(NoToken)?;
        let mut parts = front.split('.');
        if parts.next() != Some(FORM) || !is_host_and_port(at) {
            return Err(NoToken);
        }
        let mut bytes = || unhex(parts.next()?)?.try_into().ok();
        let (secret, authority) = (bytes().ok_or(NoToken)?, bytes().ok_or(NoToken)?);
        match parts.next() {
            None => Ok(Token { secret, authority, at: at.to_owned() }),
            Some(_) => Err(NoToken),
        }
    }
}

/// Whether `text` is `HOST:PORT`, with an IPv6 address in brackets.
pub fn is_host_and_port(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(host, port)| {
        let is_host = match host.strip_prefix('[') {
            Some(rest) => rest.ends_with(']'),
            None => !host.is_empty() && !host.contains(':'),
        };
        let is_plain = !host.contains(|c: char| c.is_whitespace() || c.is_control() || c == '@');
        is_host && is_plain && port.parse::<u16>().is_ok_and(|port| port > 0)
    })
}

/// The SHA-256 of some bytes.
pub(crate) fn sha256(bytes: &[u8]) -> [u8; BYTES] {
    digest(&SHA256, bytes).as_ref().try_into().expect("a SHA-256 has 32 bytes")
}

/// Encodes bytes in hexadecimal, two digits a byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decodes [`hex`]. `None` if `text` is not hexadecimal.
pub(crate) fn unhex(text: &str) -> Option<Vec<u8>> {
    if !text.is_ascii() || !text.len().is_multiple_of(2) {
        return None;
    }
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).ok();
    (0..text.len()).step_by(2).map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_as_it_is_written() {
        for at in ["m.example:7071", "192.0.2.1:1", "[2001:db8::1]:7071"] {
            let token = Token::draw(b"certificate", at).expect("drawn");
            let text = token.to_string();
            assert_eq!(text.parse(), Ok(token.clone()));
            assert_eq!(format!("{text}\n").parse(), Ok(token.clone()), "as it stands in a file");
            assert!(token.names(b"certificate") && !token.names(b"another"));
            assert_eq!(token.at(), at);
            assert!(!format!("{token:?}").contains(&token.secret()), "its secret is in logs");
        }
        let token = Token::draw(b"certificate", "m:1").expect("drawn").to_string();
        let (front, _) = token.split_once('@').expect("an address");
        for bad in [
            "".to_owned(),
            front.to_owned(),
            format!("{front}@m"),
            format!("{front}@m:0"),
            format!("{front}@::1:7"),
            format!("{front}@a b:7"),
            format!("{front}.00@m:1"),
            format!("{}@m:1", &front[..front.len() - 2]),
            token.replace("hecaton1", "hecaton2"),
            token.replacen('.', ".é", 1),
        ] {
            assert_eq!(bad.parse::<Token>(), Err(NoToken), "{bad}");
        }
    }
}
