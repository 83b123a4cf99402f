//! Defines node reports. A node reports to its manager each second, and to others on request.

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
    /// The node's name, unique in the cluster.
    pub name: String,
    /// The node's incarnation: it differs between two processes that use one name.
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
    /// The highest epoch of a manager whose answers the node has followed; zero without one.
    #[serde(default)]
    pub followed_epoch: u64,
    /// The version of the donor list that the node knows.
    #[serde(default)]
    pub donors_version: ListVersion,
    /// The node's membership in the cluster.
    #[serde(default)]
    pub member: MemberReport,
    /// The node's quota and use of the pool.
    #[serde(default)]
    pub pool: PoolShare,
    /// The donors through which the node lends.
    pub donors: Vec<DonorReport>,
    /// The consumers that borrow through the node.
    pub consumers: Vec<ConsumerReport>,
    /// Sums of all other consumers, which are not listed one by one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untold: Option<Untold>,
    /// The consumers that are virtual machines.
    #[serde(default)]
    pub vms: Vec<VmReport>,
    /// The volumes that it serves.
    #[serde(default)]
    pub volumes: Vec<VolumeReport>,
    /// Host resources that the node and its children use.
    #[serde(default)]
    pub processes: Vec<ProcessReport>,
    /// The owners of the host's memory; none if the node has no agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentReport>,
}

/// A node's own view of its membership.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberReport {
    /// The number that the manager has given the conversation; zero before that.
    pub session: u64,
    /// How many [`Orders`] of that conversation the node has acted upon.
    pub heard: u64,
    /// The incarnation of the node's memory: pages lent in another incarnation are lost.
    pub life: u64,
    /// The phase that the node believes to be in.
    pub phase: Phase,
    /// The node is leaving, but wants to stay.
    pub wants_to_stay: bool,
    /// Messages that the node has acted upon since the conversation, or its incarnation, began.
    pub messages_handled: u64,
}

/// A node's quota and use of the pool, in pages of donors' memory: a page in two copies counts as
/// two. All zero without a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolShare {
    /// The policy that the node applies.
    #[serde(default, deserialize_with = "known_or_none")]
    pub policy: Option<Choice>,
    /// The manager names a policy that the node does not know, so the node applies its own.
    #[serde(default)]
    pub is_policy_unknown: bool,
    /// Pages that its consumers may use together; none until the manager has said.
    pub quota_pages: Option<u64>,
    /// Pages that its consumers and volumes use.
    pub used_pages: u64,
    /// Pages that these consumers and volumes could use.
    pub wanted_pages: u64,
    /// Pages that it asks the manager for.
    pub request_pages: u64,
}

/// An order of the manager to a node, given once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// The named node leaves: give its memory back.
    ForceReturn {
        /// The node.
        node: String,
    },
    /// The recipient has left.
    LeaveNotify,
    /// The recipient may stay.
    StayNotify,
    /// All pages at the named node are lost.
    Invalidate {
        /// The node.
        node: String,
    },
    /// No node knows the recipient's former incarnation any more.
    InvalidateNotify,
}

/// A manager's orders to a node in one conversation that the node has not confirmed yet.
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

/// A donor's name, location and address, for borrowers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DonorAddress {
    /// The donor's name.
    pub name: String,
    /// The node that it belongs to: copies of a segment go to different nodes where they can.
    pub node: String,
    /// The location of that node, if known.
    pub location: Option<String>,
    /// Where it serves the page protocol.
    pub address: SocketAddr,
}

/// A manager's answer to a heartbeat, which is a [`NodeReport`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatAnswer {
    /// The donors of all nodes that the manager hears from.
    #[serde(flatten)]
    pub list: DonorList,
    /// Donors that must drain: take back all memory that they have lent. By name.
    #[serde(default)]
    pub draining: Vec<String>,
    /// Most bytes that a donor may lend, by the donor's name.
    #[serde(default)]
    pub limits: BTreeMap<String, u64>,
    /// The manager's epoch: each manager of a cluster has a higher one than those before it.
    #[serde(default)]
    pub epoch: u64,
    /// Orders that the node must act upon, each once.
    #[serde(default)]
    pub orders: Orders,
    /// The policy that limits each consumer; none: each consumer holds what it gets.
    #[serde(default)]
    pub policy: Option<Named>,
    /// Pages of the pool that the node's consumers may use together; none: the earlier quota holds.
    #[serde(default)]
    pub quota_pages: Option<u64>,
    /// How many harvest VMs the node may have; none: no quota exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub harvest: Option<HarvestGrant>,
    /// Most consumers that the node may list one by one; none: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_told: Option<u32>,
}

/// A holder of extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder<'a> {
    /// The consumer or volume of that name.
    One(&'a str),
    /// This many consumers, of which the report has only sums.
    Others(u32),
}

/// Cap on pages that a node claims to lend, or to hold at a donor: 4 PiB.
const MAX_HOME_PAGES: u64 = 1 << 40;

impl NodeReport {
    /// Pages that these donors may lend at present, whether lent or not; draining donors lend none.
    pub fn home_pages(donors: &[DonorReport]) -> u64 {
        let stats = donors.iter().filter_map(|donor| donor.stats.as_ref());
        let lending = stats.filter(|stats| !stats.draining).map(|stats| stats.limit_pages);
        lending.fold(0u64, u64::saturating_add).min(MAX_HOME_PAGES)
    }

    /// Resource use of the node and its children, for each process that exists at this moment.
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

    /// Pages that the node's consumers and volumes hold, each with the donor's name.
    pub fn held_at_donors(&self) -> impl Iterator<Item = (&str, u64)> {
        self.held_by_whom().map(|(_, donor, pages)| (donor, pages))
    }

    /// As [`NodeReport::held_at_donors`], with the holder of the pages.
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

/// Checks whether `name` may name a node, a donor or a consumer: such names appear in file names,
/// URLs and metric labels.
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

    /// Sums of held pages stay within their bounds, whatever a node reports.
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
