//! A volume goes to another node, which has its data where they are and serves them by itself from then on.
//!
//! What serves a volume needs its tables ([`crate::state`]), which one process has. So the process that serves it offers
//! them ([`Offer`]) to the one node that was named, while no client is attached, and that node fetches them
//! ([`fetch`]). Between the two stands one step that cannot be taken back: the tables are *given* before their first
//! byte is sent. Until then the volume is its first node's, whatever becomes of the other one; from then on it is for the other
//! node alone to serve it, and for the first one to wait until it has seen, by what donors answer, that it does.
//!
//! Donors hold both to it. The heir comes with an epoch that is higher than any that the first node's processes will ever
//! have, so that nothing of theirs is taken any more; and where nodes have certificates, donors let
//! no other node do that than the one that the owner has named to them ([`hecaton_space::Space::bequeath`]).
//!
//! Who asks whom, and what is refused: a line of JSON each way, the tables, and a line when the volume is served. Where nodes have
//! certificates both ends show theirs; keys of encrypted volumes go over no other connection.

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

/// Who asks for which volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Ask {
    version: u16,
    volume: String,
    /// The node that asks. Its certificate counts more, if it has one.
    node: String,
}

/// What is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// The tables follow.
    Given(Box<Given>),
    /// Not given, and why.
    Refused(String),
}

/// What the tables are of.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Given {
    config: VolumeConfig,
    pages: u64,
    epoch: u64,
    /// How many segments follow.
    segments: u64,
}

/// What the heir says at the end.
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
        /// Whose certificate it shows.
        found: String,
        /// Whose it should.
        wanted: String,
    },
    /// It does not give it.
    #[error("node `{holder}` does not give it: {reason}")]
    Refused {
        /// Who.
        holder: String,
        /// Why.
        reason: String,
    },
    /// What comes is something else.
    #[error("the other node speaks another version, or the connection is damaged: {0}")]
    Foreign(String),
    /// There is no memory for the tables.
    #[error(transparent)]
    Volume(#[from] crate::VolumeError),
}
