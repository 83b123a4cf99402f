//! How a donor's memory is spread over the host's NUMA nodes.
//!
//! One arena, cut in one zone for each node: an extent then lies on one node, and which it is can
//! be told from its pages. On a host with a single node there is one zone and nothing is bound.

use crate::extents::table::Zone;
use hecaton_memory::memfd::HUGE_PAGE_BYTES;
use hecaton_memory::numa::NumaNode;
use hecaton_memory::{PAGE_SIZE, Size, pages_to_bytes};

/// Most zones of a donor. A host with more nodes lends from the first ones.
pub(crate) const MAX_ZONES: usize = 64;

/// Zones begin at multiples of this, so that huge pages never span two nodes.
const ZONE_PAGES: u64 = HUGE_PAGE_BYTES / PAGE_SIZE as u64;

/// Why the memory cannot be spread as asked.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ZoneError {
    /// No such node, or one without memory.
    #[error("the host has no memory on NUMA node {node}; nodes that have some: {known}")]
    NoSuchNode {
        /// The node that was asked for.
        node: u32,
        /// Those that there are.
        known: String,
    },
    /// More is to be lent than the node has.
    #[error("NUMA node {node} has {has} of memory and {wanted} are to be lent from it: lend less")]
    NodeTooSmall {
        /// The node.
        node: u32,
        /// All its memory.
        has: Size,
        /// Memory that was asked for.
        wanted: Size,
    },
}

/// The zones of an arena of `pages` pages: all of it on the `chosen` node, or else on every node in
/// proportion to what it has free.
pub(crate) fn plan(
    pages: u64,
    nodes: &[NumaNode],
    chosen: Option<u32>,
) -> Result<Vec<Zone>, ZoneError> {
    if let Some(node) = chosen {
        check_node(node, Size(pages_to_bytes(pages)), nodes)?;
        return Ok(vec![Zone { pages, node: Some(node) }]);
    }
    let nodes = &nodes[..nodes.len().min(MAX_ZONES)];
    let free_bytes: u128 = nodes.iter().map(|node| u128::from(node.free_bytes)).sum();
    if nodes.len() < 2 || free_bytes == 0 {
        return Ok(vec![Zone { pages, node: None }]);
    }
    let mut zones: Vec<Zone> = Vec::with_capacity(nodes.len());
    for node in nodes {
        let share = u128::from(pages) * u128::from(node.free_bytes) / free_bytes;
        let share = u64::try_from(share).unwrap_or(pages) / ZONE_PAGES * ZONE_PAGES;
        zones.push(Zone { pages: share, node: Some(node.node) });
    }
    // The last node gets the remainder of the rounding: its zone needs no aligned end.
    let planned: u64 = zones.iter().map(|zone| zone.pages).sum();
    if let Some(last) = zones.last_mut() {
        last.pages += pages - planned;
    }
    zones.retain(|zone| zone.pages > 0);
    Ok(zones)
}

/// Whether the node is there and has that much memory, in use or not.
pub(crate) fn check_node(node: u32, wanted: Size, nodes: &[NumaNode]) -> Result<(), ZoneError> {
    let Some(found) = nodes.iter().find(|found| found.node == node) else {
        let known: Vec<_> = nodes.iter().map(|known| known.node.to_string()).collect();
        return Err(ZoneError::NoSuchNode { node, known: known.join(", ") });
    };
    let has = Size(found.total_bytes);
    if wanted > has {
        return Err(ZoneError::NodeTooSmall { node, has, wanted });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn node(node: u32, free_bytes: u64) -> NumaNode {
        NumaNode { node, total_bytes: 2 * free_bytes, free_bytes }
    }

    #[test]
    fn one_node_is_not_bound() {
        let whole = [Zone { pages: 1000, node: None }];
        assert_eq!(plan(1000, &[], None).unwrap(), whole);
        assert_eq!(plan(1000, &[node(0, 1 << 30)], None).unwrap(), whole);
    }

    #[test]
    fn several_nodes_lend_in_proportion() {
        let zones = plan(4096, &[node(0, 3 << 30), node(2, 1 << 30)], None).unwrap();
        assert_eq!(
            zones,
            [Zone { pages: 3072, node: Some(0) }, Zone { pages: 1024, node: Some(2) }]
        );
    }

    #[test]
    fn a_chosen_node_must_have_the_memory() {
        let nodes = [node(0, 1 << 30), node(1, 1 << 20)];
        assert_eq!(plan(512, &nodes, Some(1)).unwrap(), [Zone { pages: 512, node: Some(1) }]);
        let error = plan(513, &nodes, Some(1)).unwrap_err().to_string();
        assert!(error.contains("NUMA node 1 has 2M"), "{error}");
        let error = plan(1, &nodes, Some(7)).unwrap_err().to_string();
        assert!(error.contains("node 7; nodes that have some: 0, 1"), "{error}");
    }

    proptest! {
        #[test]
        fn zones_cover_all_pages_at_huge_page_borders(
            pages in 1u64..1 << 30,
            free in prop::collection::vec(0u64..1 << 40, 0..5),
        ) {
            let nodes: Vec<_> = (0..).zip(&free).map(|(id, &free)| node(id, free)).collect();
            let zones = plan(pages, &nodes, None).unwrap();
            prop_assert_eq!(zones.iter().map(|zone| zone.pages).sum::<u64>(), pages);
            prop_assert!(zones.iter().all(|zone| zone.pages > 0));
            let (_, earlier) = zones.split_last().unwrap();
            prop_assert!(earlier.iter().all(|zone| zone.pages % ZONE_PAGES == 0));
        }
    }
}
