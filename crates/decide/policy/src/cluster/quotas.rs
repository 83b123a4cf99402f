//! The manager's round, once a second: how many pages of the pool each node may use.
//!
//! A node begins with as many as it lends itself. The policy's second level ([`super::grants`])
//! says how many pass from whom to whom. In the paper these are pages, which nodes hand each other;
//! here they are *quotas*, and who takes which extents stays with borrowers and donors: the manager
//! is on no data path.
//!
//! Only the quotas themselves are remembered, and nodes report theirs. So a restarted manager goes
//! on where its predecessor was. Quotas that do not add up after a node came, went or changed what
//! it lends, are set right first ([`settle`]). The sum of the quotas is always what all nodes lend
//! together.

use super::NodeId;
use super::grants::{self, Forward, Need, Tlp};
use super::targets::{Policy, share};

/// A node, when the manager divides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holder {
    /// Which.
    pub node: NodeId,
    /// Pages that it lends.
    pub home_pages: u64,
    /// Pages that it might use till now; `None`: it is new.
    pub quota_pages: Option<u64>,
    /// Pages that its consumers use.
    pub used_pages: u64,
    /// Pages that its consumers could use ([`super::targets::Decision::wanted_pages`]).
    pub wanted_pages: u64,
    /// Pages that it asks for (*Grant-Any*); each request is to be handed in once.
    pub request_pages: u64,
}

/// Pages that each node may use from now on, in the nodes' order.
pub fn divide(policy: &Policy, nodes: &[Holder]) -> Vec<u64> {
    let mut quotas = settle(nodes);
    let free = |at: usize| quotas[at].saturating_sub(nodes[at].used_pages);
    let forwards = match *policy {
        Policy::GreedyLocal => return nodes.iter().map(|node| node.home_pages).collect(),
        Policy::GreedyRemote { .. } => on_request(0, nodes, free),
        Policy::Tlp(settings) => on_request(settings.reserve_pages, nodes, free),
        Policy::Anticipating(settings) => {
            let need = |(at, node): (usize, &Holder)| Need {
                node: node.node,
                home_pages: node.home_pages,
                total_pages: quotas[at],
                free_pages: free(at),
                wanted_pages: node.wanted_pages,
            };
            let needs: Vec<Need> = nodes.iter().enumerate().map(need).collect();
            grants::rebalance(&needs, settings.reserve_pages, settings.minimum_pages)
        }
    };
    let at = |id: NodeId| nodes.iter().position(|node| node.node == id);
    for Forward { from, to, pages } in forwards {
        if let (Some(from), Some(to)) = (at(from), at(to)) {
            let pages = pages.min(quotas[from]);
            quotas[from] -= pages;
            quotas[to] += pages;
        }
    }
    quotas
}

fn on_request(reserve: u64, nodes: &[Holder], free: impl Fn(usize) -> u64) -> Vec<Forward> {
    let known = nodes.iter().enumerate().map(|(at, node)| (node.node, free(at)));
    let mut tlp = Tlp::new(reserve, known);
    let mut forwards = Vec::new();
    for node in nodes.iter().filter(|node| node.request_pages > 0) {
        tlp.request(node.node, node.request_pages, &mut forwards);
    }
    forwards
}

/// Quotas that add up to what all lend. If there is less than that, those have to give who have
/// more than they lend, in proportion to how much more; if there is more, it goes home.
fn settle(nodes: &[Holder]) -> Vec<u64> {
    let homes = || nodes.iter().map(|node| node.home_pages);
    let total = homes().fold(0u64, u64::saturating_add);
    let quota = |node: &Holder| node.quota_pages.unwrap_or(node.home_pages);
    let mut quotas: Vec<u64> = nodes.iter().map(quota).collect();
    let sum = |quotas: &[u64]| quotas.iter().fold(0u64, |sum, &quota| sum.saturating_add(quota));
    let overrun = sum(&quotas).saturating_sub(total);
    if overrun > 0 {
        let mut beyond: Vec<u64> =
            quotas.iter().zip(homes()).map(|(quota, home)| quota.saturating_sub(home)).collect();
        let all = sum(&beyond);
        share::scale_to_fit(&mut beyond, all.saturating_sub(overrun));
        for ((quota, home), beyond) in quotas.iter_mut().zip(homes()).zip(beyond) {
            *quota = (*quota).min(home) + beyond;
        }
    }
    let missing: Vec<u64> =
        quotas.iter().zip(homes()).map(|(quota, home)| home.saturating_sub(*quota)).collect();
    let left = total.saturating_sub(sum(&quotas));
    let mut more = Vec::new();
    share::max_min(left, &vec![0; nodes.len()], &missing, &mut more);
    quotas.iter_mut().zip(more).for_each(|(quota, more)| *quota += more);
    // A page or so that rounding has left over where nobody has less than it lends.
    if let Some((first, others)) = quotas.split_first_mut() {
        *first = total.saturating_sub(sum(others));
    }
    quotas
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::choice::Choice;
    use proptest::prelude::*;

    fn holder(node: u32, home_pages: u64, quota_pages: Option<u64>, used_pages: u64) -> Holder {
        let (node, wanted_pages, request_pages) = (NodeId(node), used_pages, 0);
        Holder { node, home_pages, quota_pages, used_pages, wanted_pages, request_pages }
    }

    const TLP: Choice = Choice::Tlp { percent: 2, threshold_pages: 0, reserve_pages: 100 };

    #[test]
    fn who_asks_gets_what_others_leave_free_beyond_their_reserve() {
        let nodes = [
            Holder { request_pages: 700, ..holder(1, 1000, None, 1000) },
            holder(2, 1000, None, 200),
            holder(3, 1000, None, 950),
        ];
        assert_eq!(divide(&TLP.policy(), &nodes), [1700, 300, 1000]);
        let greedy = Choice::GreedyRemote { request_pages: 1000 }.policy();
        assert_eq!(divide(&greedy, &nodes), [1700, 300, 1000]);
        assert_eq!(divide(&Policy::GreedyLocal, &nodes), [1000, 1000, 1000]);
    }

    #[test]
    fn what_a_node_had_lent_goes_with_it_and_what_it_had_borrowed_goes_home() {
        // The third had lent 300 to the first, and is gone.
        let nodes = [holder(1, 1000, Some(1300), 0), holder(2, 1000, Some(1000), 0)];
        assert_eq!(divide(&TLP.policy(), &nodes), [1000, 1000]);
        // The third had borrowed 300 of the second, and is gone.
        let nodes = [holder(1, 1000, Some(1000), 0), holder(2, 1000, Some(700), 0)];
        assert_eq!(divide(&TLP.policy(), &nodes), [1000, 1000]);
    }

    #[test]
    fn ours_moves_what_is_wanted_before_it_is_asked_for() {
        let wants = Holder { wanted_pages: 60_000, ..holder(1, 40_000, None, 40_000) };
        let nodes = [wants, holder(2, 40_000, None, 0)];
        let quotas = divide(&Choice::Anticipating {}.policy(), &nodes);
        assert!(quotas[0] > 55_000 && quotas[0] + quotas[1] == 80_000, "{quotas:?}");
    }

    fn choices() -> impl Strategy<Value = Choice> {
        prop_oneof![
            Just(Choice::GreedyLocal {}),
            (1u64..5000).prop_map(|request_pages| Choice::GreedyRemote { request_pages }),
            (0u64..5000).prop_map(|reserve_pages| Choice::Tlp {
                percent: 5,
                threshold_pages: 0,
                reserve_pages,
            }),
            Just(Choice::Anticipating {}),
        ]
    }

    type Asked = (u64, Option<u64>, u64, u64, u64);

    proptest! {
        /// Whatever nodes say of themselves, what all may use is what all lend.
        #[test]
        fn quotas_are_what_is_lent(
            choice in choices(),
            asked in prop::collection::vec(
                (0u64..90_000, prop::option::of(0u64..90_000), 0u64..90_000, 0u64..90_000, 0u64..9000),
                0..9,
            ),
        ) {
            let holders = asked.iter().zip(1..).map(|(&asked, id): (&Asked, u32)| {
                let (home, quota, used, wanted_pages, request_pages) = asked;
                Holder { wanted_pages, request_pages, ..holder(id, home, quota, used) }
            });
            let nodes: Vec<Holder> = holders.collect();
            let quotas = divide(&choice.policy(), &nodes);
            let lent: u64 = nodes.iter().map(|node| node.home_pages).sum();
            prop_assert_eq!(quotas.iter().sum::<u64>(), lent);
        }

        /// A manager that takes over with what nodes say moves nothing that nobody wants.
        #[test]
        fn quotas_that_add_up_stay_while_nobody_asks(
            homes in prop::collection::vec(0u64..90_000, 1..9),
            moved in 0u64..90_000,
        ) {
            let last = homes.len() - 1;
            let moved = if last == 0 { 0 } else { moved.min(homes[0]) };
            let quota = |at: usize| match at {
                0 => homes[0] - moved + if last == 0 { moved } else { 0 },
                at if at == last => homes[at] + moved,
                at => homes[at],
            };
            let holders = homes.iter().enumerate();
            let nodes: Vec<Holder> = holders
                .map(|(at, &home)| holder(at as u32, home, Some(quota(at)), 0))
                .collect();
            let expected: Vec<u64> = (0..homes.len()).map(quota).collect();
            prop_assert_eq!(divide(&TLP.policy(), &nodes), expected);
        }
    }
}
