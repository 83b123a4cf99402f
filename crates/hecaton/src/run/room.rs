//! Tells how large a mapping a program may make.
//!
//! Memory that is paged is not charged to the host: `libhecaton.so` maps it with MAP_NORESERVE. So
//! the kernel's own rule has no effect on it, and the library applies the same rule with the pool
//! as one more swap:
//!
//! | `vm.overcommit_memory` | the kernel refuses | with Hecaton |
//! |---|---|---|
//! | 0 | one mapping larger than memory and swap | one larger than memory, swap and pool |
//! | 1 | nothing | nothing |
//! | 2 | what exceeds the host's commit limit in all | the same, which a warning says |

use crate::cluster::ClusterArgs;
use anyhow::Context as _;
use hecaton_memory::meminfo::{MEMINFO, field_bytes};
use hecaton_memory::{Size, pages_to_bytes};
use hecaton_node::cluster::report::NodeReport;
use hecaton_node::donors::DonorReport;
use hecaton_node::socket::client::NodeClient;
use std::fs;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

const MODE: &str = "/proc/sys/vm/overcommit_memory";

/// While no manager leads, a program starts all the same.
const MANAGER_PATIENCE: Duration = Duration::from_secs(5);

/// The largest mapping in bytes; `u64::MAX` if any may be made, or the size of the pool is not
/// known. Warns if the kernel will refuse less.
pub(super) fn largest_mapping(
    cluster: &ClusterArgs,
    node: &mut NodeClient,
    copies: Option<u8>,
) -> anyhow::Result<u64> {
    let read = |path| fs::read_to_string(path).with_context(|| format!("cannot read {path}"));
    let mode = read(MODE)?;
    if mode.trim() == "1" {
        return Ok(u64::MAX);
    }
    let Some(pool) = pool_bytes(cluster, node) else { return Ok(u64::MAX) };
    let host = HostRoom::parse(&read(MEMINFO)?).with_context(|| format!("{MEMINFO} is odd"))?;
    let largest = host.with_pool(pool / u64::from(copies.unwrap_or(1).max(1)));
    if mode.trim() == "2" && host.uncommitted < largest {
        eprintln!(
            "hecaton: the kernel lets programs map only {} more on this host, paged or not \
             (vm.overcommit_memory is 2); for more, run as root: sysctl vm.overcommit_memory=0",
            Size(host.uncommitted)
        );
    }
    Ok(largest)
}

/// Adds up the memory that the cluster's donors lend, in bytes, lent already or not. `None` if a
/// donor has not said how much it lends, or nobody answers.
fn pool_bytes(cluster: &ClusterArgs, node: &mut NodeClient) -> Option<u64> {
    let donors: Vec<DonorReport> = match cluster.manager().ok().flatten() {
        Some(manager) => {
            let (tell, told) = mpsc::channel();
            thread::spawn(move || {
                let donors = manager.status().ok().map(|status| {
                    status.nodes.into_iter().flat_map(|node| node.report.donors).collect()
                });
                // Nobody listens any more after the patience.
                let _ = tell.send(donors);
            });
            told.recv_timeout(MANAGER_PATIENCE).ok()??
        }
        None => {
            let report = node.status().ok()?;
            // Other nodes' donors, which were announced, do not say how much they lend.
            let known = node.donors().ok()?.len();
            (known <= report.donors.len()).then_some(report.donors)?
        }
    };
    let all_told = donors.iter().all(|donor| donor.stats.is_some());
    (all_told && !donors.is_empty()).then(|| pages_to_bytes(NodeReport::home_pages(&donors)))
}

/// Memory, swap and unused commit limit of a host, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct HostRoom {
    memory: u64,
    swap: u64,
    /// Until the commit limit, which counts in mode 2 alone.
    uncommitted: u64,
}

impl HostRoom {
    fn parse(meminfo: &str) -> Option<HostRoom> {
        let field = |name| field_bytes(meminfo, name);
        Some(HostRoom {
            memory: field("MemTotal")?,
            swap: field("SwapTotal")?,
            uncommitted: field("CommitLimit")?.saturating_sub(field("Committed_AS")?),
        })
    }

    fn with_pool(self, pool: u64) -> u64 {
        self.memory.saturating_add(self.swap).saturating_add(pool)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_and_its_pool_are_added_up() {
        let meminfo = "MemTotal:   1000 kB\nSwapTotal:   24 kB\nCommitLimit:   500 kB\n\
                       Committed_AS:   100 kB\n";
        let host = HostRoom::parse(meminfo).unwrap();
        let expected = HostRoom { memory: 1000 << 10, swap: 24 << 10, uncommitted: 400 << 10 };
        assert_eq!(host, expected);
        assert_eq!(host.with_pool(1 << 20), (1024 << 10) + (1 << 20));
        assert_eq!(host.with_pool(u64::MAX), u64::MAX);
        assert_eq!(HostRoom::parse("MemTotal: 7 kB\n"), None);
        assert!(HostRoom::parse(&fs::read_to_string(MEMINFO).unwrap()).is_some());
    }
}
