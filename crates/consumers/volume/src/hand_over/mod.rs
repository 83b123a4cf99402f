//! Hands a volume over to another node; its data stay where they are.
//!
//! A process needs the tables of a volume ([`crate::state`]) to serve it, and one process has them.
//! While no client is attached, that process offers them ([`Offer`]) to one named node, which
//! fetches them ([`fetch`]). One step in between is irreversible: the tables are *given* before
//! their first byte is sent. Until then the volume belongs to the first node, whatever happens to
//! the other one. From then on only the other node may serve it. The first node waits until donors'
//! answers show that the other node does.
//!
//! Donors enforce both. The new owner has a higher epoch than the first node's processes will ever
//! have, so donors fence those processes. Where nodes have certificates, donors accept this only
//! from the node that the owner has named to them ([`hecaton_space::Space::bequeath`]).
//!
//! Protocol: the new owner asks with a line of JSON, and the first node accepts or refuses with
//! another one. Then the tables follow. A last line says that the new owner serves the volume.
//! Where nodes have certificates, both ends show theirs. Keys of encrypted volumes go over no other
//! connection.

mod fetch;
mod offer;
pub(crate) mod stream;
pub(crate) mod tables;

pub use fetch::{Fetched, fetch};
pub use offer::{Offer, Offering};

use crate::volume::VolumeConfig;
use serde::{Deserialize, Serialize};
use std::io;
use std::time::Duration;

/// The version of what is said here.
const VERSION: u16 = 1;

/// How long the other end may say nothing, and take nothing.
const PATIENCE: Duration = Duration::from_secs(20);

/// How long donors may take to be told of the heir before anything is answered.
const TELLING: Duration = Duration::from_secs(90);

/// Longest line.
const MAX_LINE_BYTES: usize = 256 << 10;

/// Request of a node for a volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Ask {
    version: u16,
    volume: String,
    /// The node that asks. Its certificate counts more, if it has one.
    node: String,
}

/// Answer to [`Ask`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// The tables follow.
    Given(Box<Given>),
    /// Not given, and why.
    Refused(String),
}

/// Describes the volume whose tables follow.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Given {
    config: VolumeConfig,
    pages: u64,
    epoch: u64,
    /// How many segments follow.
    segments: u64,
}

/// Last message of the new owner.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Heir {
    /// The volume is served there.
    Serves,
}

/// Why a volume is not handed over.
#[derive(Debug, thiserror::Error)]
pub enum HandOverError {
    /// The other end is not reached, or says nothing more.
    #[error("the connection to the other node fails")]
    Io(#[from] io::Error),
    /// The certificate cannot be used.
    #[error(transparent)]
    Credentials(#[from] hecaton_pki::CredentialsError),
    /// TLS has not come about.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The other end's certificate says nothing.
    #[error(transparent)]
    Identity(#[from] hecaton_pki::IdentityError),
    /// It is another node.
    #[error("node `{found}` answers, and it is to be node `{wanted}`")]
    OtherNode {
        /// Node that the certificate names.
        found: String,
        /// Node that the certificate must name.
        wanted: String,
    },
    /// The node that has the volume does not give it.
    #[error("node `{holder}` does not give it: {reason}")]
    Refused {
        /// The node that refuses.
        holder: String,
        /// Why.
        reason: String,
    },
    /// The other end does not follow the protocol.
    #[error("the other node speaks another version, or the connection is damaged: {0}")]
    Foreign(String),
    /// There is no memory for the tables.
    #[error(transparent)]
    Volume(#[from] crate::VolumeError),
}
