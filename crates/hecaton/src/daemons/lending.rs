//! Checks the amount and the kind of memory that donors on this host may lend.

use crate::terminal::failure::usage;
use anyhow::Context as _;
use hecaton_memory::memfd::HUGE_PAGE_BYTES;
use hecaton_memory::numa::NumaNode;
use hecaton_memory::{Size, huge_pages};
use hecaton_node::cluster::report::Host;
use hecaton_node::donors::{DonorMemory, DonorPark};
use std::path::PathBuf;
use std::str::FromStr;

/// Minimum that a donor lends: one segment of a small space, and some to spare.
pub(crate) const MIN_LEND_BYTES: u64 = 64 << 20;

/// Arguments that choose the memory to lend.
#[derive(clap::Args)]
pub(crate) struct MemoryArgs {
    /// Lends the memory of this NUMA node alone; with `all`, that of all nodes, in proportion to
    /// the free memory of each, or with --agent to its whole memory
    #[arg(long, value_name = "NODE|all", default_value = "all", requires = "lend")]
    numa: Numa,
    /// Lends huge pages of 2 MiB, which the host must have set aside (sysctl vm.nr_hugepages); they
    /// are taken and given back with whole extents
    #[arg(long, requires = "lend")]
    huge_pages: bool,
}

/// Arguments that say where to park what is to be given back and nobody can take.
#[derive(clap::Args)]
pub(crate) struct ParkArgs {
    /// Parks in a file there what it is to give back while no other donor has room for it and it is
    /// the only copy; it is served from the file, and comes back when there is memory again
    #[arg(long, value_name = "DIR", requires = "lend", conflicts_with = "huge_pages")]
    park: Option<PathBuf>,
    /// Most that each donor parks [default: as much as the file system has room for]
    #[arg(long, value_name = "SIZE", requires = "park")]
    park_limit: Option<Size>,
}

impl ParkArgs {
    /// The donors' parking place, if any. Fails if the directory does not exist.
    pub(crate) fn check(&self) -> anyhow::Result<Option<DonorPark>> {
        let Some(dir) = &self.park else { return Ok(None) };
        let dir = std::path::absolute(dir).with_context(|| format!("--park {}", dir.display()))?;
        if !dir.is_dir() {
            usage!("--park {}: there is no such directory", dir.display());
        }
        Ok(Some(DonorPark { dir, limit_bytes: self.park_limit.map(|limit| limit.0) }))
    }
}

/// The NUMA nodes whose memory is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Numa {
    All,
    Node(u32),
}

impl FromStr for Numa {
    type Err = String;

    fn from_str(text: &str) -> Result<Numa, String> {
        match text {
            "all" => Ok(Numa::All),
            number => number
                .parse()
                .map(Numa::Node)
                .map_err(|_| "write a NUMA node's number, such as 0, or `all`".to_owned()),
        }
    }
}

impl MemoryArgs {
    /// The kind of memory. Fails if the host has too little of it for `donors` times `lend`.
    pub(crate) fn check(&self, lend: Size, donors: u16) -> anyhow::Result<DonorMemory> {
        let total_bytes = lend.0.saturating_mul(u64::from(donors));
        let numa_node = match self.numa {
            Numa::All => None,
            Numa::Node(node) => Some(node),
        };
        if let Some(node) = numa_node
            && let Err(error) = hecaton_donor::check_numa_node(node, total_bytes)
        {
            usage!("--numa {node}: {error}");
        }
        if self.huge_pages {
            huge_pages::check(total_bytes, numa_node).context("--huge-pages")?;
        }
        Ok(DonorMemory { numa_node, huge_pages: self.huge_pages })
    }
}

/// Divides `lend` among NUMA nodes, as pairs of node number and bytes, in proportion to their
/// memory. The other nodes take over a part that is below [`MIN_LEND_BYTES`].
pub(crate) fn parts(lend: Size, nodes: &[NumaNode]) -> Vec<(u32, u64)> {
    let mut nodes = nodes.to_vec();
    nodes.sort_by_key(|node| (u64::MAX - node.total_bytes, node.node));
    loop {
        let all: u128 = nodes.iter().map(|node| u128::from(node.total_bytes.max(1))).sum();
        let part = |node: &NumaNode| {
            let part = u128::from(lend.0) * u128::from(node.total_bytes.max(1)) / all;
            part as u64 / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        };
        let least = nodes.last().map_or(0, part);
        if least < MIN_LEND_BYTES && nodes.len() > 1 {
            nodes.pop();
            continue;
        }
        let mut parts: Vec<_> = nodes.iter().map(|node| (node.node, part(node))).collect();
        let rest = lend.0 - parts.iter().map(|(_, bytes)| bytes).sum::<u64>();
        // The largest node lends the rest.
        parts.iter_mut().take(1).for_each(|(_, bytes)| *bytes += rest);
        parts.sort_unstable();
        return parts;
    }
}

/// Refuses to lend less than [`MIN_LEND_BYTES`].
pub(crate) fn check_least(lend: Size) -> anyhow::Result<()> {
    if lend.0 < MIN_LEND_BYTES {
        usage!("--lend {lend} is too little: lend at least {}", Size(MIN_LEND_BYTES));
    }
    Ok(())
}

/// Refuses donors that would lend more than the host's memory.
pub(crate) fn check_total(lend: Size, donors: u16, host: &Host) -> anyhow::Result<()> {
    if lend.0.saturating_mul(u64::from(donors)) > host.memory_bytes {
        let from = match donors {
            1 => String::new(),
            donors => format!(" from {donors} donors"),
        };
        usage!("--lend {lend}{from} is more than the {} of this machine", Size(host.memory_bytes));
    }
    Ok(())
}

/// Refuses to keep all of the host's memory available, or more: nothing would be lent.
pub(crate) fn check_kept(keep_free: Size, host: &Host) -> anyhow::Result<()> {
    let total = Size(host.memory_bytes);
    if keep_free >= total {
        usage!("--keep-free {keep_free} leaves nothing to lend of the {total} of this machine");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_lends_its_part() {
        const M: u64 = 1 << 20;
        let node = |node, mib: u64| NumaNode { node, total_bytes: mib * M, free_bytes: 0 };
        let two = [node(0, 3000), node(2, 1001)];
        let parts_of = |mib: u64| parts(Size(mib * M), &two);
        assert_eq!(parts_of(1000), [(0, 750 * M), (2, 250 * M)]);
        assert_eq!(parts_of(255), [(0, 255 * M)], "the part of node 2 is too little");
        assert_eq!(parts_of(64), [(0, 64 * M)]);
        let even = parts(Size(301 * M), &[node(0, 500), node(1, 500), node(3, 500)]);
        assert_eq!(even, [(0, 101 * M), (1, 100 * M), (3, 100 * M)]);
    }

    #[test]
    fn numa_nodes_are_numbers_or_all() {
        assert_eq!("all".parse(), Ok(Numa::All));
        assert_eq!("12".parse(), Ok(Numa::Node(12)));
        for bad in ["", "-1", "0,1", "ALL", "99999999999"] {
            assert!(bad.parse::<Numa>().is_err(), "{bad}");
        }
    }
}
