//! What a node says about itself, every second, to its manager and to whoever asks.

use crate::agent::{AgentReport, HarvestGrant};
use crate::children::processes::{ProcessReport, ProcessUse, Role};
use crate::cluster::brief::Untold;
use crate::cluster::donor_list::{DonorList, ListVersion};
use crate::donors::DonorReport;
use crate::pagers::ConsumerReport;
use crate::vms::VmReport;
use crate::volumes::VolumeReport;
use hecaton_memory::meminfo::{MEMINFO, field_bytes};
use hecaton_policy::cluster::choice::{Choice, Named, known_or_none};
use hecaton_policy::cluster::member::Phase;
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
    /// The highest epoch of a manager whose answers it has followed; zero if there was none.
    #[serde(default)]
    pub followed_epoch: u64,
    /// What it knows of the cluster's donors.
    #[serde(default)]
    pub donors_version: ListVersion,
    /// Its part in the cluster.
    #[serde(default)]
    pub member: MemberReport,
    /// What it may use of the pool.
    #[serde(default)]
    pub pool: PoolShare,
    /// What it lends through.
    pub donors: Vec<DonorReport>,
    /// What borrows through it.
    pub consumers: Vec<ConsumerReport>,
    /// Consumers besides, of which only this is told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untold: Option<Untold>,
    /// Those of its consumers that are virtual machines.
    #[serde(default)]
    pub vms: Vec<VmReport>,
    /// The volumes that it serves.
    #[serde(default)]
    pub volumes: Vec<VolumeReport>,
    /// What the node and the processes that it runs take of their host.
    #[serde(default)]
    pub processes: Vec<ProcessReport>,
    /// Who has which part of the host's memory; none if the node has no agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentReport>,
}

/// Where a node stands with its manager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberReport {
    /// The number that the manager has given their conversation; zero before it has.
    pub session: u64,
    /// How many of the [`Orders`] of that conversation it has acted upon.
    pub heard: u64,
    /// The life of its memory: what it lent in another one is gone.
    pub life: u64,
    /// Where it believes to stand.
    pub phase: Phase,
    /// Leaving, it would rather stay.
    pub wants_to_stay: bool,
    /// Messages that it has acted upon since the conversation, or its life, began.
    pub messages_handled: u64,
}

/// What a node may use of the pool, and uses, in pages of donors' memory: a page in two copies is two.
/// All zero where there is no policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolShare {
    /// The policy that it divides by.
    #[serde(default, deserialize_with = "known_or_none")]
    pub policy: Option<Choice>,
    /// The manager names one that the node does not know: it goes on by its own.
    #[serde(default)]
    pub is_policy_unknown: bool,
    /// Pages that its consumers may use together; none until the manager has said.
    pub quota_pages: Option<u64>,
    /// Pages that its consumers and volumes use.
    pub used_pages: u64,
    /// Pages that they could use.
    pub wanted_pages: u64,
    /// Pages that it asks the manager for.
    pub request_pages: u64,
}

/// What a manager says to a node, once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// That node leaves: its memory is to be given back.
    ForceReturn {
        /// The node.
        node: String,
    },
    /// The recipient has left.
    LeaveNotify,
    /// The recipient may stay.
    StayNotify,
    /// What is at that node is lost.
    Invalidate {
        /// The node.
        node: String,
    },
    /// Nobody knows the recipient's former life any more.
    InvalidateNotify,
}

/// What a manager says to a node in one conversation, as far as it does not know that the node has heard it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orders {
    /// The conversation's number.
    pub session: u64,
    /// The number of the first order; they are counted from zero.
    pub first: u64,
    /// The orders.
    pub orders: Vec<Order>,
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
    #[serde(flatten)]
    pub list: DonorList,
    /// Donors that are to give back all that they have lent, by name.
    #[serde(default)]
    pub draining: Vec<String>,
    /// Donors that are to lend no more than so many bytes, by name.
    #[serde(default)]
    pub limits: BTreeMap<String, u64>,
    /// The manager's epoch: each manager of a cluster has a higher one than those before it.
    #[serde(default)]
    pub epoch: u64,
    /// What the node is to act upon, each once.
    #[serde(default)]
    pub orders: Orders,
    /// Who may hold how much; none: everybody what it gets.
    #[serde(default)]
    pub policy: Option<Named>,
    /// Pages of the pool that the node's consumers may use together; none: what the node was told before.
    #[serde(default)]
    pub quota_pages: Option<u64>,
    /// How many harvest VMs the node may have; none: there is no quota of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub harvest: Option<HarvestGrant>,
    /// Of how many consumers the node is to tell one by one; none: of all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_told: Option<u32>,
}

/// Who holds extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder<'a> {
    /// The consumer or volume of that name.
    One(&'a str),
    /// So many consumers, of which only sums are told.
    Others(u32),
}

/// Most pages that a node is believed to lend, or to hold at a donor: 4 PiB.
const MAX_HOME_PAGES: u64 = 1 << 40;

impl NodeReport {
    /// Pages that a node with these donors lends at present, lent or not.
    pub fn home_pages(donors: &[DonorReport]) -> u64 {
        let stats = donors.iter().filter_map(|donor| donor.stats.as_ref());
        let lending = stats.filter(|stats| !stats.draining).map(|stats| stats.limit_pages);
        lending.fold(0u64, u64::saturating_add).min(MAX_HOME_PAGES)
    }

    /// Itself and what it runs, as far as there are processes of it at this moment.
    pub(crate) fn running(&self) -> Vec<ProcessReport> {
        let own = [(Role::Node, &self.name, Some(self.pid))];
        let donors = self.donors.iter().map(|one| (Role::Donor, &one.name, one.pid));
        let pagers = self.consumers.iter().map(|one| (Role::Pager, &one.name, one.pid));
        let volumes = self.volumes.iter().map(|one| (Role::Volume, &one.name, one.pid));
        let all = own.into_iter().chain(donors).chain(pagers).chain(volumes);
        all.filter_map(|(role, name, pid)| {
            let takes = ProcessUse::of(pid?)?;
            Some(ProcessReport { role, name: name.clone(), takes })
        })
        .collect()
    }

    /// The donors that its consumers and volumes hold extents at, with pages.
    pub fn held_at_donors(&self) -> impl Iterator<Item = (&str, u64)> {
        self.held_by_whom().map(|(_, donor, pages)| (donor, pages))
    }

    /// As [`NodeReport::held_at_donors`], with who holds them.
    pub fn held_by_whom(&self) -> impl Iterator<Item = (Holder<'_>, &str, u64)> {
        let consumers = self.consumers.iter().flat_map(|one| {
            let holder = Holder::One(&one.name);
            one.held_at_donors().map(move |(donor, pages)| (holder, donor, pages))
        });
        let untold = self.untold.iter().flat_map(|untold| {
            let holder = Holder::Others(untold.consumers);
            untold.held_pages.iter().map(move |(donor, pages)| (holder, donor.as_str(), *pages))
        });
        let volumes = self.volumes.iter().filter_map(|one| Some((one, one.stats.as_ref()?)));
        let volumes = volumes.flat_map(|(one, stats)| {
            let holder = Holder::One(&one.name);
            let segment_pages = stats.pool.segment_pages;
            stats.pool.donors.iter().map(move |donor| {
                (holder, donor.name.as_str(), donor.extents.saturating_mul(segment_pages))
            })
        });
        let all = consumers.chain(untold).chain(volumes);
        all.map(|(holder, donor, pages)| (holder, donor, pages.min(MAX_HOME_PAGES)))
            .filter(|(.., pages)| *pages > 0)
    }

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

    /// Sums of it stay within their bounds, whatever a node says.
    #[test]
    fn nobody_holds_more_than_there_can_be() {
        let untold = Untold {
            held_pages: BTreeMap::from([("d".to_owned(), u64::MAX)]),
            ..Untold::default()
        };
        let report = NodeReport { untold: Some(untold), ..NodeReport::default() };
        assert!(report.held_at_donors().eq([("d", MAX_HOME_PAGES)]));
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
