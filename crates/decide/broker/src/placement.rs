//! Chooses the nodes for a new VM's memory.
//!
//! A regular VM is within one node wherever any order of reclaiming makes that possible, evictions
//! included. The paper measures up to 40 % of performance lost by spanning (section 4.2), and an
//! evicted harvest VM comes back. Among several nodes, the choice costs least, by the order in
//! which the classes give back.

use crate::host::NodeNo;

/// Bytes that a node could give, in the order in which they are given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Layers {
    /// Nobody's; the buffer is part of it.
    pub(crate) free: u64,
    pub(crate) lent_free: u64,
    pub(crate) ephemeral: u64,
    pub(crate) harvested: u64,
    pub(crate) lent_used: u64,
    pub(crate) minimum: u64,
}

impl Layers {
    fn all(&self) -> u64 {
        [self.lent_free, self.ephemeral, self.harvested, self.lent_used, self.minimum]
            .into_iter()
            .fold(self.free, u64::saturating_add)
    }

    /// Bytes taken of each layer, the last layer first. A smaller list costs less.
    fn cost(&self, bytes: u64) -> [u64; 6] {
        let mut left = bytes.saturating_sub(self.free);
        let mut cost = [0; 6];
        let layers = [self.lent_free, self.ephemeral, self.harvested, self.lent_used, self.minimum];
        for (at, layer) in layers.into_iter().enumerate() {
            cost[4 - at] = left.min(layer);
            left -= cost[4 - at];
        }
        // Not to be had at all, which is worse than all else.
        cost[0] = cost[0].saturating_add(left);
        // Holes for larger newcomers are left where they are.
        cost[5] = self.all().saturating_sub(bytes);
        cost
    }
}

/// The node that has so much free now: where the buffer suffers least, and then where it fits best.
/// `free`: what nobody has and nobody waits for.
pub(crate) fn at_once(
    bytes: u64,
    nodes: impl Iterator<Item = NodeNo>,
    free: &[u64],
    buffer: &[u64],
) -> Option<NodeNo> {
    nodes.filter(|&n| free[n] >= bytes).min_by_key(|&n| {
        let left = free[n] - bytes;
        (buffer[n].saturating_sub(left), left, n)
    })
}

/// The node that costs least, of those that have it within reach. `waited_for`: what others that
/// came before will have of it.
pub(crate) fn within_reach(
    bytes: u64,
    nodes: impl Iterator<Item = NodeNo>,
    reach: &[u64],
    waited_for: &[u64],
    layers: &[Layers],
) -> Option<NodeNo> {
    nodes
        .filter(|&n| reach[n] >= bytes)
        .min_by_key(|&n| (layers[n].cost(bytes.saturating_add(waited_for[n])), n))
}

/// Over as few nodes as possible, those with the most within reach first; none if it is not to be
/// had at all. Parts are whole chunks.
pub(crate) fn spanning(bytes: u64, reach: &[u64], chunk: u64) -> Option<Vec<u64>> {
    let mut order: Vec<NodeNo> = (0..reach.len()).collect();
    order.sort_by_key(|&n| (u64::MAX - reach[n], n));
    let mut parts = vec![0; reach.len()];
    let mut left = bytes;
    for n in order {
        parts[n] = left.min(reach[n] / chunk * chunk);
        left -= parts[n];
    }
    (left == 0).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_suffers_least_and_holes_stay_large() {
        let all = || 0..3;
        assert_eq!(at_once(4, all(), &[9, 6, 20], &[2, 2, 2]), Some(1));
        assert_eq!(at_once(4, all(), &[5, 5, 20], &[2, 2, 2]), Some(2));
        assert_eq!(at_once(21, all(), &[5, 5, 20], &[2, 2, 2]), None);
    }

    #[test]
    fn the_least_is_lost() {
        let layers = [
            Layers { free: 1, minimum: 50, ..Layers::default() },
            Layers { free: 1, harvested: 50, ..Layers::default() },
            Layers { free: 1, lent_used: 50, ..Layers::default() },
        ];
        let reach = [51, 51, 51];
        assert_eq!(within_reach(9, 0..3, &reach, &[0; 3], &layers), Some(1));
        assert_eq!(within_reach(9, [0, 2].into_iter(), &reach, &[0; 3], &layers), Some(2));
        assert_eq!(within_reach(9, 0..3, &reach, &[0, 50, 0], &layers), Some(2));
        assert_eq!(within_reach(60, 0..3, &reach, &[0; 3], &layers), None);
    }

    #[test]
    fn spanning_takes_few_nodes() {
        assert_eq!(spanning(10, &[3, 9, 4], 1), Some(vec![0, 9, 1]));
        assert_eq!(spanning(10, &[3, 9, 4], 2), Some(vec![0, 8, 2]));
        assert_eq!(spanning(17, &[3, 9, 4], 1), None);
    }
}
