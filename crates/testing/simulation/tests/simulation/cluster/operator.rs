//! Gives managers orders for donors, and remembers which orders must hold.
//! An acknowledged order holds until the next one. A failed order may or may not have been taken.

use super::{Body, Letter, OPERATOR, Reply, Request, manager_host};
use crate::borrower::donor_name;
use crate::dice::Dice;
use crate::network::Network;
use std::collections::VecDeque;
use std::time::Duration;

/// Time limit of a reply: longer than any letter takes that is not lost.
const PATIENCE: Duration = Duration::from_secs(3);

/// Maximum of waiting orders.
const MOST_ORDERS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Drain(bool),
    Limit(Option<u64>),
}

/// Last orders that one donor may have been given.
#[derive(Debug)]
struct Told {
    draining: Vec<bool>,
    limits: Vec<Option<u64>>,
}

#[derive(Debug)]
struct Ordering {
    donor: usize,
    order: Order,
    /// Whether the order is repeated until a manager acknowledges it.
    insists: bool,
    call: u64,
    until: Duration,
    /// Whether some manager may have taken the order.
    is_unsure: bool,
}

pub(super) struct Operator {
    told: Vec<Told>,
    /// One order at a time.
    ordering: Option<Ordering>,
    /// Orders that follow, each as soon as the previous order is over.
    next: VecDeque<Ordering>,
    managers: usize,
    asks: usize,
    calls: u64,
    pub(super) acknowledged: u64,
    pub(super) unsure: u64,
}

impl Operator {
    pub(super) fn new(donors: usize, managers: usize) -> Operator {
        let told = || Told { draining: vec![false], limits: vec![None] };
        Operator {
            told: (0..donors).map(|_| told()).collect(),
            ordering: None,
            next: VecDeque::new(),
            managers,
            asks: 0,
            calls: 0,
            acknowledged: 0,
            unsure: 0,
        }
    }

    /// Queues an order after the earlier ones. Drops it if [`MOST_ORDERS`] orders wait.
    pub(super) fn order(&mut self, donor: usize, order: Order, insists: bool) {
        if self.next.len() < MOST_ORDERS {
            let (call, until, is_unsure) = (0, Duration::ZERO, false);
            self.next.push_back(Ordering { donor, order, insists, call, until, is_unsure });
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.ordering.is_none() && self.next.is_empty()
    }

    /// Whether a donor's state matches an order that may be its last one.
    pub(super) fn is_obeyed(&self, donor: usize, draining: bool, limit: Option<u64>) -> bool {
        let told = &self.told[donor];
        told.draining.contains(&draining) && told.limits.contains(&limit)
    }

    /// Describes the orders that the donors may have been given.
    pub(super) fn words(&self) -> String {
        format!("{:?} {:?}", self.told, self.ordering)
    }

    pub(super) fn tick(&mut self, now: Duration, net: &mut Network, dice: &mut Dice) {
        if self.ordering.is_none() {
            self.ordering = self.next.pop_front();
        }
        let Some(ordering) = &mut self.ordering else { return };
        if now < ordering.until {
            return;
        }
        if ordering.call != 0 {
            ordering.is_unsure = true;
            if !ordering.insists {
                return self.give_up();
            }
            self.asks = (self.asks + 1) % self.managers;
        }
        self.calls += 1;
        (ordering.call, ordering.until) = (self.calls, now + PATIENCE);
        let donor = donor_name(ordering.donor);
        let request = match ordering.order {
            Order::Drain(draining) => Request::Drain(donor, draining),
            Order::Limit(limit) => Request::Limit(donor, limit),
        };
        let (to, body) = (manager_host(self.asks), Body::Request(request));
        net.post(Letter { from: OPERATOR, to, call: self.calls, body }, dice);
    }

    pub(super) fn receive(&mut self, call: u64, reply: &Reply, now: Duration) {
        let Some(ordering) = self.ordering.as_mut().filter(|ordering| ordering.call == call) else {
            return;
        };
        match reply {
            Reply::Done => {
                let told = &mut self.told[ordering.donor];
                match ordering.order {
                    Order::Drain(draining) => told.draining = vec![draining],
                    Order::Limit(limit) => told.limits = vec![limit],
                }
                self.acknowledged += 1;
                self.ordering = None;
            }
            Reply::Unwritten | Reply::Broken => ordering.is_unsure = true,
            _ => {}
        }
        if let Some(ordering) = &mut self.ordering {
            match ordering.insists {
                // Not before the time limit, or two managers could take the order at once.
                true => ordering.until = ordering.until.max(now),
                false => self.give_up(),
            }
        }
    }

    fn give_up(&mut self) {
        let Some(Ordering { donor, order, is_unsure: true, .. }) = self.ordering.take() else {
            return;
        };
        self.unsure += 1;
        match order {
            Order::Drain(draining) => self.told[donor].draining.push(draining),
            Order::Limit(limit) => self.told[donor].limits.push(limit),
        }
    }
}
