//! What a node says about itself, every second, to its manager and to whoever asks.

use crate::donors::DonorReport;
use crate::pagers::ConsumerReport;
use crate::vms::VmReport;
use hecaton_memory::meminfo::{MEMINFO, field_bytes};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::{fs, io};

/// A node, its donors and its consumers.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct NodeReport {
    /// The node's name; one of its kind in the cluster.
    pub name: String,
    /// Which life of the node this is: two processes that use one name differ in it.
    pub boot: u64,
    /// Where the node stands (rack, zone), as its owner wrote it.
    pub location: Option<String>,
    /// The node's process.
    pub pid: u32,
    /// The version of Hecaton that it runs.
    pub version: String,
    /// The host, so that commands can tell which nodes are on theirs.
    pub host: Host,
    /// Where commands on the same host reach the node.
    pub control_socket: PathBuf,
    /// What it lends through.
    pub donors: Vec<DonorReport>,
    /// What borrows through it.
    pub consumers: Vec<ConsumerReport>,
    /// Those of them that are virtual machines.
    #[serde(default)]
    pub vms: Vec<VmReport>,
}

/// The machine that a node runs on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// The kernel's boot id: the same for all processes of one running host, and for no other.
    pub boot_id: String,
    /// Memory that the host has, in bytes.
    pub memory_bytes: u64,
    /// Memory that programs could still have without swapping, in bytes.
    pub available_bytes: u64,
}

impl Host {
    /// This machine, at this moment.
    pub fn here() -> io::Result<Host> {
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let meminfo = fs::read_to_string(MEMINFO)?;
        let field = |name| {
            field_bytes(&meminfo, name)
                .ok_or_else(|| io::Error::other(format!("{MEMINFO} has no {name}")))
        };
        Ok(Host {
            boot_id: boot_id.trim().to_owned(),
            memory_bytes: field("MemTotal")?,
            available_bytes: field("MemAvailable")?,
        })
    }
}

/// A donor as borrowers need to know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DonorAddress {
    /// The donor's name.
    pub name: String,
    /// The node that it belongs to: copies of a segment go to different nodes where they can.
    pub node: String,
    /// Where that node stands, if that is known.
    pub location: Option<String>,
    /// Where it serves the page protocol.
    pub address: SocketAddr,
}

/// What a manager answers to a heartbeat, which is a [`NodeReport`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatAnswer {
    /// The donors of all nodes that the manager hears from.
    pub donors: Vec<DonorAddress>,
    /// Donors that are to give back all that they have lent, by name.
    #[serde(default)]
    pub draining: Vec<String>,
    /// Donors that are to lend no more than so many bytes, by name.
    #[serde(default)]
    pub limits: BTreeMap<String, u64>,
}

impl NodeReport {
    /// The donors that can be reached, for the directory.
    pub fn donor_addresses(&self) -> impl Iterator<Item = DonorAddress> {
        self.donors.iter().filter_map(|donor| {
            Some(DonorAddress {
                name: donor.name.clone(),
                node: self.name.clone(),
                location: self.location.clone(),
                address: donor.address?,
            })
        })
    }
}

/// Whether `name` may name a node, a donor or a consumer: they stand in file names, URLs and
/// metric labels.
pub fn check_name(name: &str) -> Result<(), NameError> {
    let fits = (1..=64).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        && !name.starts_with(['.', '-']);
    if fits { Ok(()) } else { Err(NameError(name.to_owned())) }
}

/// A text that cannot be a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` cannot be a name: use 1 to 64 letters, digits, `-`, `_` and `.`, beginning with a \
     letter or digit"
)]
pub struct NameError(pub String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_memory_and_a_boot_id() {
        let host = Host::here().expect("read");
        assert!(host.available_bytes > 0 && host.available_bytes <= host.memory_bytes);
        assert_eq!(host.boot_id.len(), 36);
    }

    #[test]
    fn names_are_checked() {
        for good in ["a", "donor-1", "sort_2.x", &"n".repeat(64)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        for bad in ["", ".", "../x", "-a", "a/b", "a b", "ä", &"n".repeat(65)] {
            assert_eq!(check_name(bad), Err(NameError(bad.to_owned())), "{bad}");
        }
    }
}
