//! Represents the administrator's choice of policy, as stored, sent and shown.
//!
//! [`Policy`] is separate: the settings of our own policy are found by trial and may change with
//! each version. A cluster with that policy gets the best settings of the version that runs.

use super::targets::{Policy, anticipating, tlp};
use hecaton_memory::{Size, pages_to_bytes};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;

/// A policy that was chosen for a cluster. One that is read can be: see [`Choice::check`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "policy", deny_unknown_fields)]
pub enum Choice {
    /// Each node for itself, first come, first served.
    GreedyLocal {},
    /// First come, first served, and more from other nodes.
    GreedyRemote {
        /// Pages to ask for in a second with failed puts.
        #[serde(deserialize_with = "some_pages")]
        request_pages: u64,
    },
    /// The paper's two-level policy.
    Tlp {
        /// P, in percent, from 1 to 100.
        #[serde(deserialize_with = "a_percentage")]
        percent: u64,
        /// Pages that a consumer may leave unused before its target falls.
        threshold_pages: u64,
        /// Pages that a node keeps free when others ask (R).
        reserve_pages: u64,
    },
    /// Ours.
    Anticipating {},
}

/// A choice in the words of somebody who may be of another version.
///
/// Versions add policies and settings, and a cluster has mixed versions while it is upgraded. A
/// node that hears of an unknown policy must still understand the rest of the answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Named {
    /// One that this version has.
    Known(Choice),
    /// Another one, or one with settings that this version does not have.
    Unknown {
        /// Its name.
        policy: String,
    },
}

impl Named {
    /// The choice, if this version has it.
    pub fn known(&self) -> Option<Choice> {
        match self {
            Named::Known(choice) => Some(*choice),
            Named::Unknown { .. } => None,
        }
    }
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Named::Known(choice) => choice.fmt(f),
            Named::Unknown { policy } => write!(f, "{policy:?}, which this version does not know"),
        }
    }
}

/// Reads a choice, and none where there is one that this version does not have.
pub fn known_or_none<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Choice>, D::Error> {
    let named = Option::<Named>::deserialize(from)?;
    Ok(named.and_then(|named| named.known()))
}

/// Why there can be no such policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ChoiceError {
    /// P is no part of a whole, or none at all.
    #[error("P of {0} % cannot be: targets move by 1 to 100 % a second")]
    Percent(u64),
    /// Nothing would ever be asked for.
    #[error("a request of 0 pages asks for nothing: greedy-local is the policy without requests")]
    NoRequest,
}

impl Choice {
    /// Whether it can be.
    pub fn check(&self) -> Result<(), ChoiceError> {
        match *self {
            Choice::Tlp { percent, .. } => check_percent(percent),
            Choice::GreedyRemote { request_pages } => check_request(request_pages),
            Choice::GreedyLocal {} | Choice::Anticipating {} => Ok(()),
        }
    }

    /// Policy with its settings, as this version has them.
    pub fn policy(&self) -> Policy {
        match *self {
            Choice::GreedyLocal {} => Policy::GreedyLocal,
            Choice::GreedyRemote { request_pages } => Policy::GreedyRemote { request_pages },
            Choice::Tlp { percent, threshold_pages, reserve_pages } => {
                Policy::Tlp(tlp::Settings { percent, threshold_pages, reserve_pages })
            }
            Choice::Anticipating {} => Policy::Anticipating(anticipating::Settings::default()),
        }
    }

    /// Its name, as it is chosen by.
    pub fn name(&self) -> &'static str {
        match self {
            Choice::GreedyLocal {} => "greedy-local",
            Choice::GreedyRemote { .. } => "greedy-remote",
            Choice::Tlp { .. } => "tlp",
            Choice::Anticipating {} => "anticipating",
        }
    }
}

/// As `hecaton policy set` takes it.
impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = |pages| Size(pages_to_bytes(pages));
        f.write_str(self.name())?;
        match *self {
            Choice::GreedyLocal {} | Choice::Anticipating {} => Ok(()),
            Choice::GreedyRemote { request_pages } => {
                write!(f, " --request {}", size(request_pages))
            }
            Choice::Tlp { percent, threshold_pages, reserve_pages } => {
                let (threshold, reserve) = (size(threshold_pages), size(reserve_pages));
                write!(f, " --p {percent} --threshold {threshold} --reserve {reserve}")
            }
        }
    }
}

fn check_percent(percent: u64) -> Result<(), ChoiceError> {
    let is_one = (1..=100).contains(&percent);
    is_one.then_some(()).ok_or(ChoiceError::Percent(percent))
}

fn check_request(pages: u64) -> Result<(), ChoiceError> {
    (pages > 0).then_some(()).ok_or(ChoiceError::NoRequest)
}

fn a_percentage<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let percent = u64::deserialize(from)?;
    check_percent(percent).map_err(D::Error::custom)?;
    Ok(percent)
}

fn some_pages<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let pages = u64::deserialize(from)?;
    check_request(pages).map_err(D::Error::custom)?;
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_is_refused() {
        let tlp = |percent| Choice::Tlp { percent, threshold_pages: 0, reserve_pages: u64::MAX };
        assert_eq!(tlp(0).check(), Err(ChoiceError::Percent(0)));
        assert_eq!(tlp(101).check(), Err(ChoiceError::Percent(101)));
        assert_eq!(tlp(1).check().and(tlp(100).check()), Ok(()));
        let nothing = Choice::GreedyRemote { request_pages: 0 };
        assert_eq!(nothing.check(), Err(ChoiceError::NoRequest));
        assert_eq!(Choice::Anticipating {}.check(), Ok(()));
    }
}
