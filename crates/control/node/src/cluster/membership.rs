//! Runs the node's side of membership, the pure [`Member`], over heartbeats.
//!
//! The node's messages follow from its phase. Each heartbeat repeats them until the manager has
//! acted on them, so none is lost with an answer, a manager or a connection. The manager sends
//! numbered [`Order`]s, and repeats them until the node has heard them.

use crate::cluster::report::{MemberReport, Order, Orders};
use hecaton_policy::cluster::NodeId;
use hecaton_policy::cluster::member::{Member, Phase};
use hecaton_policy::cluster::message::ToNode;
use std::collections::BTreeMap;

/// The node itself; others are numbered as they are named.
const SELF: NodeId = NodeId(0);

/// A node's membership, and how far it has heard its manager.
#[derive(Debug)]
pub struct Membership {
    name: String,
    member: Member,
    /// The manager's number for this conversation; zero before the first.
    session: u64,
    /// Orders of it that were acted upon.
    heard: u64,
    ids: BTreeMap<String, NodeId>,
}

impl Membership {
    /// Membership of a node that starts in this `life` with `home_pages` pages to lend. `recovers`:
    /// the pages that it lent before are gone.
    pub fn start(name: &str, life: u64, home_pages: u64, recovers: bool) -> Membership {
        let start = if recovers { Member::start_after_crash } else { Member::start };
        // The heartbeats carry the phase, which replaces the returned messages.
        let (member, _) = start(SELF, life, home_pages);
        Membership { name: name.to_owned(), member, session: 0, heard: 0, ids: BTreeMap::new() }
    }

    /// For the next heartbeat.
    pub fn report(&self) -> MemberReport {
        let holdings = self.member.holdings();
        MemberReport {
            session: self.session,
            heard: self.heard,
            life: holdings.life,
            phase: self.member.phase(),
            wants_to_stay: self.member.wants_to_stay(),
            messages_handled: holdings.messages_handled,
        }
    }

    /// Whether the other nodes still forget the pages that it lent before: it lends nothing yet.
    pub fn is_recovering(&self) -> bool {
        self.member.phase() == Phase::Recovering
    }

    /// Its present life.
    pub fn life(&self) -> u64 {
        self.member.life()
    }

    /// Acts upon what the manager says; `leaves` says whether it is to leave, or to stay if it
    /// is about to. `new_life` is one that it never registered with, should it join again.
    pub fn follow(&mut self, orders: &Orders, leaves: bool, new_life: u64) {
        if orders.session != self.session {
            self.session = orders.session;
            self.heard = 0;
            self.ids.clear();
            // The next heartbeat replaces the returned messages.
            let _ = self.member.reconnected();
        }
        for (number, order) in (orders.first..).zip(&orders.orders) {
            // The manager repeats an order until it hears that the order arrived.
            if number == self.heard {
                self.heard += 1;
                let message = self.message(order);
                let _ = self.member.handle(&message);
            }
        }
        // Each follows from the phase, and does nothing in another one.
        let _ = match leaves {
            true => self.member.leave(),
            false if self.member.phase() == Phase::Inactive => self.member.register(new_life),
            false => self.member.stay(),
        };
    }

    fn message(&mut self, order: &Order) -> ToNode {
        match order {
            Order::ForceReturn { node } => ToNode::ForceReturn(self.id(node)),
            Order::Invalidate { node } => ToNode::Invalidate(self.id(node)),
            Order::LeaveNotify => ToNode::LeaveNotify,
            Order::StayNotify => ToNode::StayNotify,
            Order::InvalidateNotify => ToNode::InvalidateNotify,
        }
    }

    fn id(&mut self, name: &str) -> NodeId {
        if name == self.name {
            return SELF;
        }
        let next = NodeId(self.ids.len() as u32 + 1);
        *self.ids.entry(name.to_owned()).or_insert(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orders(session: u64, first: u64, orders: Vec<Order>) -> Orders {
        Orders { session, first, orders }
    }

    fn invalidate_notify(session: u64) -> Orders {
        orders(session, 0, vec![Order::InvalidateNotify])
    }

    #[test]
    fn a_node_that_recovers_takes_part_when_it_is_let_in() {
        let mut node = Membership::start("a", 7, 100, true);
        assert!(node.is_recovering());
        node.follow(&orders(1, 0, vec![]), false, 8);
        assert!(node.is_recovering());
        node.follow(&invalidate_notify(1), false, 8);
        assert!(!node.is_recovering());
        assert_eq!((node.report().phase, node.life()), (Phase::Active, 7));
    }

    #[test]
    fn orders_are_acted_upon_once_and_in_order() {
        let leaves = |node: &str| Order::ForceReturn { node: node.to_owned() };
        let mut node = Membership::start("a", 7, 100, false);
        node.follow(&orders(1, 0, vec![leaves("b"), leaves("c")]), false, 8);
        assert_eq!((node.report().heard, node.report().messages_handled), (2, 2));
        // The manager has not heard that they arrived.
        node.follow(&orders(1, 0, vec![leaves("b"), leaves("c"), leaves("d")]), false, 8);
        assert_eq!((node.report().heard, node.report().messages_handled), (3, 3));
        // One is missing.
        node.follow(&orders(1, 4, vec![leaves("f")]), false, 8);
        assert_eq!(node.report().heard, 3);
        // Another manager, or the same one anew.
        node.follow(&orders(2, 0, vec![leaves("b")]), false, 8);
        let MemberReport { session, heard, messages_handled, .. } = node.report();
        assert_eq!((session, heard, messages_handled), (2, 1, 1));
    }

    #[test]
    fn a_node_leaves_when_it_is_drained_and_may_think_better_of_it() {
        let mut node = Membership::start("a", 7, 100, false);
        node.follow(&orders(1, 0, vec![]), true, 8);
        assert_eq!(node.report().phase, Phase::Leaving);
        node.follow(&orders(1, 0, vec![]), false, 8);
        let report = node.report();
        assert_eq!((report.phase, report.wants_to_stay), (Phase::Leaving, true));
        node.follow(&orders(1, 0, vec![Order::StayNotify]), false, 8);
        assert_eq!((node.report().phase, node.life()), (Phase::Active, 7));
        // Until it has left: then it joins again, in another life.
        node.follow(&orders(1, 1, vec![]), true, 8);
        node.follow(&orders(1, 1, vec![Order::LeaveNotify]), true, 8);
        assert_eq!((node.report().phase, node.life()), (Phase::Inactive, 7));
        node.follow(&orders(1, 2, vec![]), false, 8);
        assert_eq!((node.report().phase, node.life()), (Phase::Active, 8));
    }
}
