//! Accounts each node's memory by class, as one step sees it.

use crate::accounts::cores::Cores;
use crate::host::{Host, NodeNo, Order, VmId};
use std::collections::BTreeMap;

/// A part of memory whose size the broker sets.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Key {
    /// A device of a harvest VM, by its node.
    Device(VmId, NodeNo),
    /// A node's donors.
    Lent(NodeNo),
    /// A node's ephemeral pools.
    Ephemeral(NodeNo),
}

/// Orders in flight, not yet known to be carried out: at most one for each key.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orders {
    last: u64,
    under_way: BTreeMap<Key, (Order, u64)>,
}

impl Orders {
    /// The size that the order in flight asks for; none if no order is in flight.
    pub(crate) fn under_way(&self, key: Key) -> Option<u64> {
        self.under_way.get(&key).map(|(_, bytes)| *bytes)
    }

    /// Issues a new order. No other order for `key` may be in flight.
    pub(crate) fn give(&mut self, key: Key, bytes: u64) -> Order {
        self.last += 1;
        let before = self.under_way.insert(key, (Order(self.last), bytes));
        debug_assert!(before.is_none(), "a second order for {key:?}");
        Order(self.last)
    }

    /// Forgets orders that were carried out, and orders whose node, VM or device is gone.
    pub(crate) fn settle(&mut self, host: &Host) {
        self.under_way.retain(|key, (order, _)| {
            let done = match *key {
                Key::Lent(node) => host.nodes.get(node).map(|node| node.lent.done),
                Key::Ephemeral(node) => host.nodes.get(node).map(|node| node.ephemeral.done),
                Key::Device(vm, node) => {
                    let vm = host.vms.iter().find(|other| other.id == vm);
                    let device = vm.and_then(|vm| vm.devices().iter().find(|d| d.node == node));
                    device.map(|device| device.done)
                }
            };
            done.is_some_and(|done| done < *order)
        });
    }
}

/// Bytes of each node, by class; and cores.
#[derive(Clone, Debug, Default)]
pub(crate) struct Books {
    pub(crate) total: Vec<u64>,
    pub(crate) system: Vec<u64>,
    pub(crate) regular: Vec<u64>,
    pub(crate) minimum: Vec<u64>,
    pub(crate) harvested: Vec<u64>,
    pub(crate) lent_used: Vec<u64>,
    pub(crate) lent_free: Vec<u64>,
    pub(crate) ephemeral: Vec<u64>,
    pub(crate) cores: Cores,
}

impl Books {
    pub(crate) fn open(host: &Host, orders: &Orders) -> Books {
        let nodes = host.nodes.len();
        let mut books = Books {
            total: host.nodes.iter().map(|node| node.total_bytes).collect(),
            system: host.nodes.iter().map(|n| n.system_bytes.min(n.total_bytes)).collect(),
            regular: vec![0; nodes],
            minimum: vec![0; nodes],
            harvested: vec![0; nodes],
            lent_used: host.nodes.iter().map(|node| node.lent.used_bytes).collect(),
            lent_free: vec![0; nodes],
            ephemeral: vec![0; nodes],
            cores: Cores::open(host),
        };
        for (n, node) in host.nodes.iter().enumerate() {
            let may_lend = orders.under_way(Key::Lent(n)).unwrap_or(0).max(node.lent.limit_bytes);
            books.lent_free[n] = may_lend.saturating_sub(node.lent.used_bytes);
            let ordered = orders.under_way(Key::Ephemeral(n)).unwrap_or(0);
            let ephemeral = node.ephemeral;
            books.ephemeral[n] = ordered.max(ephemeral.limit_bytes).max(ephemeral.used_bytes);
        }
        for vm in &host.vms {
            let base = if vm.harvest.is_some() { &mut books.minimum } else { &mut books.regular };
            for (sum, bytes) in base.iter_mut().zip(&vm.base_bytes) {
                *sum = sum.saturating_add(*bytes);
            }
            for device in vm.devices() {
                let key = Key::Device(vm.id, device.node);
                let ordered = orders.under_way(key).unwrap_or(0);
                for (n, sum) in books.harvested.iter_mut().enumerate() {
                    *sum = sum.saturating_add(device.charge(n, ordered));
                }
            }
        }
        books
    }

    pub(crate) fn nodes(&self) -> usize {
        self.total.len()
    }

    /// Memory of a node for virtual machines and for uses that can give it back.
    pub(crate) fn capacity(&self, node: NodeNo) -> u64 {
        self.total[node] - self.system[node]
    }

    fn charged(&self, node: NodeNo) -> u64 {
        [
            &self.regular,
            &self.minimum,
            &self.harvested,
            &self.lent_used,
            &self.lent_free,
            &self.ephemeral,
        ]
        .iter()
        .fold(0, |sum: u64, class| sum.saturating_add(class[node]))
    }

    /// Memory that no class has or may take.
    pub(crate) fn free(&self, node: NodeNo) -> u64 {
        self.capacity(node).saturating_sub(self.charged(node))
    }

    /// Memory that is charged to a class but does not exist.
    pub(crate) fn overdrawn(&self, node: NodeNo) -> u64 {
        self.charged(node).saturating_sub(self.capacity(node))
    }

    /// Memory that regular VMs could gain if all other classes gave everything back.
    pub(crate) fn reach(&self, node: NodeNo) -> u64 {
        self.capacity(node).saturating_sub(self.regular[node])
    }
}
