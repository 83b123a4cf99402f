//! Seals and opens datagrams that announce a node's donors.
//!
//! | bytes | |
//! |---|---|
//! | 0–7 | `HECATON1` |
//! | 8–39 | HMAC-SHA-256 of what follows; zeros where there is no key |
//! | 40– | an [`Announcement`] as JSON |
//!
//! The key proves that the sender belongs to the cluster. It does not make a datagram fresh: a
//! recorded one can be sent again after its node's end. Borrowers then try an address where no
//! service or another one listens. Pages and requests to donors go over separate connections, which
//! have their own protection.

use super::Network;
use crate::cluster::report::{DonorAddress, NodeReport, check_name};
use ring::hmac;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::Path;
use std::{fmt, fs, io};

/// Most bytes of a datagram: what an Ethernet frame carries without being split.
pub const MAX_BYTES: usize = 1400;

/// The least that a key must have: as much as cannot be guessed.
pub const MIN_KEY_BYTES: usize = 16;

const MAGIC: &[u8; 8] = b"HECATON1";
const TAG_BYTES: usize = 32;
const HEAD_BYTES: usize = MAGIC.len() + TAG_BYTES;

/// Message of a node to its network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announcement {
    /// The node's name.
    pub node: String,
    /// Which life of it this is.
    pub boot: u64,
    /// Rises with each announcement of one life.
    pub number: u64,
    /// Where it stands (rack, zone).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// All donors of the node. None in a farewell.
    pub donors: Vec<Announced>,
}

/// A donor in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announced {
    /// Its name.
    pub name: String,
    /// Where it serves the page protocol.
    pub address: SocketAddr,
}

/// The secret that all nodes of a network have, if they have one.
#[derive(Clone)]
pub struct Key(hmac::Key);

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file cannot be read.
    #[error("cannot read the key in {path}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// The key is too short.
    #[error(
        "the key in {path} has {bytes} bytes, and at least {MIN_KEY_BYTES} are needed: write a new one with \
         `head -c 32 /dev/urandom > {path}`"
    )]
    Short {
        /// The file.
        path: String,
        /// Its length.
        bytes: usize,
    },
}

/// Why a datagram is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It is not one of ours.
    #[error("it is no announcement of Hecaton's")]
    Foreign,
    /// It was made with another key, or none.
    #[error("its sender has another key (--announce-key)")]
    WrongKey,
    /// It does not say what it should.
    #[error("it cannot be understood: the sender may be of another version")]
    Malformed,
}

/// An announcement that is too long for a datagram: its length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the donors of this node need {0} bytes, and an announcement has room for {MAX_BYTES}")]
pub struct TooLong(pub usize);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// Any bytes, as many as [`MIN_KEY_BYTES`] at least.
    pub fn read(path: &Path) -> Result<Key, KeyError> {
        let shown = || path.display().to_string();
        let secret = fs::read(path).map_err(|source| KeyError::Read { path: shown(), source })?;
        if secret.len() < MIN_KEY_BYTES {
            return Err(KeyError::Short { path: shown(), bytes: secret.len() });
        }
        Ok(Key::new(&secret))
    }

    pub(crate) fn new(secret: &[u8]) -> Key {
        Key(hmac::Key::new(hmac::HMAC_SHA256, secret))
    }
}

impl Announcement {
    /// The number of a node's last one.
    pub const LAST: u64 = u64::MAX;

    /// Announces the donors in `report`, at addresses that other nodes can reach.
    pub(crate) fn of(report: &NodeReport, number: u64, network: &Network) -> Announcement {
        let announced = |donor: DonorAddress| Announced {
            name: donor.name,
            address: network.reachable(donor.address),
        };
        Announcement {
            node: report.name.clone(),
            boot: report.boot,
            number,
            location: report.location.clone(),
            donors: report.donor_addresses().map(announced).collect(),
        }
    }

    /// The donors, as borrowers need to know them.
    pub fn addresses(&self) -> impl Iterator<Item = DonorAddress> {
        self.donors.iter().map(|donor| DonorAddress {
            name: donor.name.clone(),
            node: self.node.clone(),
            location: self.location.clone(),
            address: donor.address,
        })
    }

    /// Its bytes.
    pub fn seal(&self, key: Option<&Key>) -> Result<Vec<u8>, TooLong> {
        let text = serde_json::to_vec(self).expect("names and numbers can be written");
        let mut bytes = Vec::with_capacity(HEAD_BYTES + text.len());
        bytes.extend_from_slice(MAGIC);
        match key {
            Some(Key(key)) => bytes.extend_from_slice(hmac::sign(key, &text).as_ref()),
            None => bytes.extend_from_slice(&[0; TAG_BYTES]),
        }
        bytes.extend_from_slice(&text);
        if bytes.len() > MAX_BYTES { Err(TooLong(bytes.len())) } else { Ok(bytes) }
    }

    /// The announcement in `bytes`, if its sender has the key. Without a key, accepts each sender
    /// that has no key either.
    pub fn open(bytes: &[u8], key: Option<&Key>) -> Result<Announcement, Refusal> {
        let body = bytes.strip_prefix(MAGIC).ok_or(Refusal::Foreign)?;
        let (tag, text) = body.split_at_checked(TAG_BYTES).ok_or(Refusal::Foreign)?;
        let is_ours = match key {
            Some(Key(key)) => hmac::verify(key, text, tag).is_ok(),
            None => tag == [0; TAG_BYTES],
        };
        if !is_ours {
            return Err(Refusal::WrongKey);
        }
        let announcement: Announcement =
            serde_json::from_slice(text).map_err(|_| Refusal::Malformed)?;
        let donors = announcement.donors.iter().map(|donor| &donor.name);
        let are_names = donors.chain([&announcement.node]).all(|name| check_name(name).is_ok());
        if are_names { Ok(announcement) } else { Err(Refusal::Malformed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn announcement() -> Announcement {
        let donor = Announced { name: "a-1".into(), address: ([10, 0, 0, 1], 7071).into() };
        Announcement {
            node: "a".into(),
            boot: 7,
            number: 3,
            location: Some("r1/c2".into()),
            donors: vec![donor],
        }
    }

    #[test]
    fn only_those_with_the_same_key_are_believed() {
        let (ours, theirs) = (Key::new(b"0123456789abcdef"), Key::new(b"another of theirs"));
        let sealed = announcement().seal(Some(&ours)).unwrap();
        assert_eq!(Announcement::open(&sealed, Some(&ours)), Ok(announcement()));
        for other in [Some(&theirs), None] {
            assert_eq!(Announcement::open(&sealed, other), Err(Refusal::WrongKey));
        }
        let open = announcement().seal(None).unwrap();
        assert_eq!(Announcement::open(&open, None), Ok(announcement()));
        assert_eq!(Announcement::open(&open, Some(&ours)), Err(Refusal::WrongKey));
    }

    #[test]
    fn what_is_none_or_names_nobody_is_refused() {
        for bytes in
            [&b""[..], b"HECATON", b"HECATON1", b"HECATON2aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"]
        {
            assert_eq!(Announcement::open(bytes, None), Err(Refusal::Foreign), "{bytes:?}");
        }
        let bad = Announcement { node: "../a".into(), ..announcement() };
        let sealed = bad.seal(None).unwrap();
        assert_eq!(Announcement::open(&sealed, None), Err(Refusal::Malformed));
        let mut many = announcement();
        many.donors = vec![many.donors[0].clone(); 64];
        assert!(matches!(many.seal(None), Err(TooLong(bytes)) if bytes > MAX_BYTES));
    }

    #[test]
    fn a_short_key_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        assert!(matches!(Key::read(&path), Err(KeyError::Read { .. })));
        fs::write(&path, b"short").unwrap();
        assert!(matches!(Key::read(&path), Err(KeyError::Short { bytes: 5, .. })));
        fs::write(&path, [7; MIN_KEY_BYTES]).unwrap();
        let key = Key::read(&path).expect("long enough");
        assert_eq!(format!("{key:?}"), "Key", "nothing of it is in logs");
    }

    proptest! {
        /// A bit that is changed anywhere makes it another's.
        #[test]
        fn no_altered_byte_is_believed(at in any::<prop::sample::Index>(), bit in 0u32..8) {
            let key = Key::new(b"0123456789abcdef");
            let mut sealed = announcement().seal(Some(&key)).unwrap();
            let at = at.index(sealed.len());
            sealed[at] ^= 1 << bit;
            prop_assert!(Announcement::open(&sealed, Some(&key)).is_err());
        }

        #[test]
        fn nothing_that_comes_does_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Announcement::open(&bytes, None);
            let mut bytes = bytes;
            bytes.splice(0..0, MAGIC.iter().copied().chain([0; TAG_BYTES]));
            let _ = Announcement::open(&bytes, None);
        }
    }
}
