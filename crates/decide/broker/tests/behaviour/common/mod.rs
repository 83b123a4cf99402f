//! A host whose guests do at once what they are asked for.

#![allow(dead_code, reason = "each test uses its part")]

use hecaton_broker::{
    Action, Broker, Device, Harvest, Host, Newcomer, NewcomerKind, NumaNode, Vm, VmId,
};
use std::time::Duration;

pub(crate) const G: u64 = 1 << 30;
pub(crate) const BLOCK: u64 = 2 << 20;

/// A host of so many nodes with nobody on it.
pub(crate) fn host(nodes: usize, bytes: u64) -> Host {
    let node = NumaNode { total_bytes: bytes, ..NumaNode::default() };
    Host { nodes: vec![node; nodes], ..Host::default() }
}

pub(crate) fn newcomer(id: u64, kind: NewcomerKind, bytes: u64) -> Newcomer {
    Newcomer { id: VmId(id), kind, bytes, cores: 0, node: None }
}

/// A harvest VM with its minimum on one node, which can grow on all of them.
pub(crate) fn harvest_vm(id: u64, nodes: usize, base_bytes: Vec<u64>, max_bytes: u64) -> Vm {
    let most = max_bytes.saturating_sub(base_bytes.iter().sum());
    let device = |node| Device {
        node,
        block_bytes: BLOCK,
        max_bytes: most,
        requested_bytes: 0,
        plugged_bytes: 0,
        held_bytes: vec![0; nodes],
        scattered_bytes: 0,
        done: Default::default(),
        is_heard: true,
    };
    let devices = (0..nodes).map(device).collect();
    Vm { id: VmId(id), base_bytes, cores: 0, harvest: Some(Harvest { max_bytes, devices }) }
}

pub(crate) fn device_mut(host: &mut Host, vm: VmId, node: usize) -> &mut Device {
    let vm = host.vms.iter_mut().find(|other| other.id == vm).expect("a VM");
    let harvest = vm.harvest.as_mut().expect("a harvest VM");
    harvest.devices.iter_mut().find(|device| device.node == node).expect("a device")
}

pub(crate) fn harvested(host: &Host, vm: u64) -> u64 {
    let vm = host.vms.iter().find(|other| other.id == VmId(vm)).expect("a VM");
    vm.devices().iter().map(|device| device.plugged_bytes).sum()
}

/// Does what is asked, at once and in full. New harvest VMs may have `max_bytes`.
pub(crate) fn carry_out(host: &mut Host, actions: &[Action], max_bytes: u64) {
    for action in actions {
        match *action {
            Action::Admit { vm, ref base_bytes } => {
                let at =
                    host.waiting.iter().position(|waiting| waiting.id == vm).expect("it waits");
                let newcomer = host.waiting.remove(at);
                let mut new = harvest_vm(vm.0, host.nodes.len(), base_bytes.clone(), max_bytes);
                new.cores = newcomer.cores;
                if newcomer.kind != NewcomerKind::Harvest {
                    new.harvest = None;
                }
                host.vms.push(new);
            }
            Action::Refuse { vm, .. } => host.waiting.retain(|waiting| waiting.id != vm),
            Action::Grow { vm, node, requested_bytes, order }
            | Action::Shrink { vm, node, requested_bytes, order, .. } => {
                let device = device_mut(host, vm, node);
                device.requested_bytes = requested_bytes;
                device.plugged_bytes = requested_bytes;
                device.held_bytes[node] = requested_bytes;
                device.done = order;
            }
            Action::Lend { node, limit_bytes, order }
            | Action::Recall { node, limit_bytes, order } => {
                let lent = &mut host.nodes[node].lent;
                lent.limit_bytes = limit_bytes;
                lent.used_bytes = lent.used_bytes.min(limit_bytes);
                lent.done = order;
            }
            Action::Ephemeral { node, limit_bytes, order } => {
                let ephemeral = &mut host.nodes[node].ephemeral;
                ephemeral.limit_bytes = limit_bytes;
                ephemeral.used_bytes = ephemeral.used_bytes.min(limit_bytes);
                ephemeral.done = order;
            }
            Action::Evict { vm, .. } => host.vms.retain(|other| other.id != vm),
            Action::Warn { .. } | Action::Spare { .. } | Action::ShutDown { .. } => {}
        }
    }
}

/// Steps until nothing is to be done, and says what was done.
pub(crate) fn settle(
    broker: &mut Broker,
    host: &mut Host,
    now: Duration,
    max_bytes: u64,
) -> Vec<Action> {
    let mut all = Vec::new();
    for _ in 0..1000 {
        let actions = broker.step(host, now);
        if actions.is_empty() {
            return all;
        }
        carry_out(host, &actions, max_bytes);
        all.extend(actions);
    }
    panic!("it never settles: {all:?}");
}
