//! The second level, at the manager: from which nodes a node in need gets pages.
//!
//! [`Tlp`] is the paper's algorithm 3: whoever asks is given at once, from those with the most free
//! pages. [`rebalance`] is ours: once a period the memory of the whole cluster is divided max-min
//! fairly among what the nodes could use, with each node's own memory as its floor; and what
//! differs is moved.
//!
//! Both decide from statistics that are up to a second old, so a donor may have less by then: it
//! gives what it has, and who is still in need asks again.

use super::NodeId;
use super::targets::share;
use std::collections::BinaryHeap;

/// A Grant-Fwd: `from` is to give `to` so many pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Forward {
    /// Node that gives.
    pub from: NodeId,
    /// Node that gets.
    pub to: NodeId,
    /// How many.
    pub pages: u64,
}

/// The second level of TLP (algorithm 3), for the requests of one period.
///
/// The paper leaves some choices open. They are decided so:
///
/// - `np[i].tmem` is read as the node's *free* pages. Table I's `total_tmem` counts allocated pages
///   too. With it, the nodes in need would be asked first, and could give nothing.
/// - The node that asks is not asked.
/// - A node that would keep exactly R is asked. Both comparisons of the algorithm leave it out.
/// - Forwarded pages are taken off a donor's known pages until it is heard of again. Else all
///   requests within a second go to the same donor.
/// - The nodes are kept in a heap instead of being sorted for each request.
#[derive(Clone, Debug)]
pub struct Tlp {
    reserve_pages: u64,
    /// Free pages and, for equals, the lower id first.
    most_free: BinaryHeap<(u64, std::cmp::Reverse<NodeId>)>,
}

impl Tlp {
    /// For a period that begins with these free pages. `reserve_pages` (R) stay with each.
    pub fn new(reserve_pages: u64, free: impl IntoIterator<Item = (NodeId, u64)>) -> Tlp {
        let lendable = |&(_, pages): &(_, u64)| pages > reserve_pages;
        let entry = |(node, pages)| (pages, std::cmp::Reverse(node));
        Tlp { reserve_pages, most_free: free.into_iter().filter(lendable).map(entry).collect() }
    }

    /// Where a Grant-Any of `to` is sent. The pages may be fewer than asked for, or none.
    pub fn request(&mut self, to: NodeId, pages: u64, forwards: &mut Vec<Forward>) {
        let mut left = pages;
        let mut own = None;
        while left > 0
            && let Some(most) = self.most_free.pop()
        {
            let (free, std::cmp::Reverse(from)) = most;
            if from == to {
                own = Some(most);
                continue;
            }
            let pages = left.min(free - self.reserve_pages);
            left -= pages;
            forwards.push(Forward { from, to, pages });
            if free - pages > self.reserve_pages {
                self.most_free.push((free - pages, std::cmp::Reverse(from)));
            }
        }
        self.most_free.extend(own);
    }
}

/// One node's numbers when the manager rebalances.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Need {
    /// Which.
    pub node: NodeId,
    /// Pages of its own memory.
    pub home_pages: u64,
    /// Pages that it owns.
    pub total_pages: u64,
    /// Owned pages that no consumer uses.
    pub free_pages: u64,
    /// Pages that its consumers could use ([`super::targets::Decision::wanted_pages`]).
    pub wanted_pages: u64,
}

/// Returns the moves of a period. A node keeps the part of its own memory that it could use. The
/// rest is divided evenly among nodes that could use more. A node is asked for at most half of what
/// it owns, and moves of less than `least_pages` are not made. Free pages go first.
pub fn rebalance(needs: &[Need], reserve_pages: u64, least_pages: u64) -> Vec<Forward> {
    let least_pages = least_pages.max(1);
    let total = needs.iter().fold(0u64, |sum, need| sum.saturating_add(need.total_pages));
    let bid = |need: &Need| need.wanted_pages.saturating_add(reserve_pages);
    let bids: Vec<u64> = needs.iter().map(bid).collect();
    let floors: Vec<u64> = needs.iter().map(|need| need.home_pages.min(bid(need))).collect();
    let mut fair = Vec::new();
    share::max_min(total, &floors, &bids, &mut fair);

    // A reserve is kept, and not asked for.
    let lacking = |(at, need): (usize, &Need)| {
        let lacks = fair[at].min(need.wanted_pages).saturating_sub(need.total_pages);
        (lacks >= least_pages).then_some((at, lacks))
    };
    let takers: Vec<(usize, u64)> = needs.iter().enumerate().filter_map(lacking).collect();
    if takers.is_empty() {
        return Vec::new();
    }
    let spare = |at: usize| {
        let need = &needs[at];
        need.total_pages.saturating_sub(fair[at]).min(need.total_pages / 2)
    };
    let free = |at: usize| spare(at).min(needs[at].free_pages);
    let in_use = |at: usize| spare(at) - free(at);
    let mut donors: Vec<(usize, u64)> = (0..needs.len()).map(|at| (at, free(at))).collect();
    donors.sort_by_key(|&(at, pages)| (std::cmp::Reverse(pages), at));
    let mut recalled: Vec<(usize, u64)> = (0..needs.len()).map(|at| (at, in_use(at))).collect();
    recalled.sort_by_key(|&(at, pages)| (std::cmp::Reverse(pages), at));
    donors.extend(recalled);
    donors.retain(|&(_, pages)| pages >= least_pages);

    // The available pages go to all nodes that lack some, not to the first ones.
    let available = donors.iter().map(|&(_, pages)| pages).sum();
    let lacks: Vec<u64> = takers.iter().map(|&(_, lacks)| lacks).collect();
    let mut gets = Vec::new();
    share::max_min(available, &vec![0; lacks.len()], &lacks, &mut gets);

    let mut forwards = Vec::new();
    let mut donors = donors.into_iter();
    let mut donor = donors.next();
    for (&(taker, _), mut lacks) in takers.iter().zip(gets) {
        while lacks > 0
            && let Some((at, spare)) = &mut donor
        {
            let pages = lacks.min(*spare);
            lacks -= pages;
            *spare -= pages;
            forwards.push(Forward { from: needs[*at].node, to: needs[taker].node, pages });
            if *spare == 0 {
                donor = donors.next();
            }
        }
    }
    forwards
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(tlp: &mut Tlp, to: u32, pages: u64) -> Vec<(u32, u64)> {
        let mut forwards = Vec::new();
        tlp.request(NodeId(to), pages, &mut forwards);
        assert!(forwards.iter().all(|forward| forward.to == NodeId(to)));
        forwards.iter().map(|forward| (forward.from.0, forward.pages)).collect()
    }

    #[test]
    fn algorithm_3_asks_the_one_with_the_most_first_and_leaves_r() {
        let free = [(1, 500), (2, 900), (3, 80), (4, 1000)];
        let free = free.map(|(node, pages)| (NodeId(node), pages));
        let mut tlp = Tlp::new(100, free);
        assert_eq!(request(&mut tlp, 4, 300), [(2, 300)]);
        assert_eq!(request(&mut tlp, 1, 1200), [(4, 900), (2, 300)]);
        assert_eq!(request(&mut tlp, 2, 1000), [(1, 400)], "nobody gives what it has not");
        assert_eq!(request(&mut tlp, 3, 1000), [(2, 200)]);
        assert_eq!(request(&mut tlp, 3, 1), []);
    }

    fn need(node: u32, total: u64, free: u64, wanted: u64) -> Need {
        let node = NodeId(node);
        Need { node, home_pages: 1000, total_pages: total, free_pages: free, wanted_pages: wanted }
    }

    #[test]
    fn what_is_not_wanted_is_divided_among_those_who_want_it() {
        let forward = |from, to, pages| Forward { from: NodeId(from), to: NodeId(to), pages };
        let idle = need(1, 1000, 1000, 0);
        let both = [idle, need(2, 1000, 0, 5000), need(3, 1000, 0, 5000)];
        let forwards = rebalance(&both, 0, 1);
        // Half of what it owns, in a period.
        assert_eq!(forwards, [forward(1, 2, 250), forward(1, 3, 250)]);
        // One came late: the other gives up half of what it got.
        let late = [need(1, 0, 0, 0), need(2, 2000, 0, 5000), need(3, 1000, 0, 5000)];
        assert_eq!(rebalance(&late, 0, 1), [forward(2, 3, 500)]);
        // Its own memory is its own.
        let home = [need(1, 400, 0, 1000), need(2, 1600, 0, 5000)];
        assert_eq!(rebalance(&home, 0, 1), [forward(2, 1, 600)]);
    }

    prop_compose! {
        fn any_needs()(
            sizes in prop::collection::vec((0u64..2000, 0u64..2000, 0u64..=100, 0u64..5000), 1..12),
        ) -> Vec<Need> {
            let need = |(at, &(home, total, free, wanted)): (usize, &(u64, u64, u64, u64))| Need {
                node: NodeId(at as u32),
                home_pages: home,
                total_pages: total,
                free_pages: total * free / 100,
                wanted_pages: wanted,
            };
            sizes.iter().enumerate().map(need).collect()
        }
    }

    proptest! {
        #[test]
        fn algorithm_3_never_overdraws_a_node(
            free in prop::collection::vec(0u64..1000, 1..10),
            asked in prop::collection::vec((0u32..10, 0u64..2000), 0..10),
            reserve in 0u64..500,
        ) {
            let nodes = free.iter().enumerate().map(|(at, &pages)| (NodeId(at as u32), pages));
            let mut tlp = Tlp::new(reserve, nodes);
            let mut left = free.clone();
            for &(to, pages) in &asked {
                let before: u64 = left
                    .iter()
                    .enumerate()
                    .filter(|(at, _)| *at as u32 != to)
                    .map(|(_, free)| free.saturating_sub(reserve))
                    .sum();
                let mut given = 0;
                for (from, pages) in request(&mut tlp, to, pages) {
                    prop_assert_ne!(from, to);
                    prop_assert!(left[from as usize] >= pages + reserve);
                    left[from as usize] -= pages;
                    given += pages;
                }
                prop_assert_eq!(given, pages.min(before), "all that may be given is");
            }
        }

        #[test]
        fn rebalancing_takes_from_plenty_and_gives_to_want(
            needs in any_needs(),
            reserve in 0u64..300,
            least in 1u64..100,
        ) {
            for forward in rebalance(&needs, reserve, least) {
                prop_assert_ne!(forward.from, forward.to);
                prop_assert!(forward.pages > 0);
            }
            let forwards = rebalance(&needs, reserve, least);
            for need in &needs {
                let sum = |pages: &dyn Fn(&Forward) -> bool| {
                    forwards.iter().filter(|f| pages(f)).map(|f| f.pages).sum::<u64>()
                };
                let given = sum(&|forward| forward.from == need.node);
                let got = sum(&|forward| forward.to == need.node);
                prop_assert!(given == 0 || got == 0);
                prop_assert!(given <= need.total_pages / 2);
                // Its own memory is not taken from it while it could use it.
                let own = need.home_pages.min(need.wanted_pages);
                if given > 0 && needs.iter().map(|n| n.total_pages).sum::<u64>()
                    >= needs.iter().map(|n| n.home_pages).sum::<u64>()
                {
                    prop_assert!(need.total_pages - given >= own.min(need.total_pages));
                }
                prop_assert!(got == 0 || need.total_pages + got <= need.wanted_pages);
            }
        }

        #[test]
        fn rebalancing_comes_to_rest(needs in any_needs(), reserve in 0u64..300) {
            let mut needs = needs;
            for _ in 0..64 {
                let forwards = rebalance(&needs, reserve, 1);
                if forwards.is_empty() {
                    return Ok(());
                }
                for Forward { from, to, pages } in forwards {
                    let (from, to) = (from.0 as usize, to.0 as usize);
                    needs[from].total_pages -= pages;
                    needs[from].free_pages = needs[from].free_pages.saturating_sub(pages);
                    needs[to].total_pages += pages;
                }
            }
            prop_assert!(false, "pages still move after 64 periods: {:?}", needs);
        }
    }
}
