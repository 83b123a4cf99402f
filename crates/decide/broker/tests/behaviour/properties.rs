//! Whatever the host looks like: the ledger adds up, and nothing is promised twice.

use crate::common::{BLOCK, carry_out};
use hecaton_broker::{
    Action, Broker, Device, Elastic, Harvest, Host, Newcomer, NewcomerKind, NumaNode, Order,
    Settings, Vm, VmId,
};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::time::Duration;

/// Sizes are small multiples of a block, so that they meet.
fn blocks(most: u64) -> impl Strategy<Value = u64> {
    (0..=most).prop_map(|blocks| blocks * BLOCK)
}

prop_compose! {
    fn any_settings()(
        buffer in blocks(40),
        even_buffer in any::<bool>(),
        batch in prop::option::of(1u64..20),
        parallel in any::<bool>(),
        least in 0u64..4,
        quota in 0usize..6,
        lend_ahead in blocks(10),
        ephemeral_cap in blocks(20),
    ) -> Settings {
        Settings {
            buffer_bytes: buffer,
            even_buffer,
            batch_bytes: batch.map(|batch| batch * BLOCK),
            parallel,
            least_change_bytes: least * BLOCK,
            harvest_quota: quota,
            lend_ahead_bytes: lend_ahead,
            ephemeral_cap_bytes: ephemeral_cap,
            ..Settings::default()
        }
    }
}

/// A device in any state, sound or not.
fn any_device(nodes: usize, node: usize) -> impl Strategy<Value = Device> {
    let held = prop::collection::vec(blocks(20), nodes);
    (blocks(60), blocks(60), blocks(60), held, prop_oneof![Just(0), blocks(5)], 0u32..3, 0u8..4)
        .prop_map(move |(max, requested, plugged, mut held, scattered, order, wild)| {
            let block_bytes = BLOCK << order;
            let whole = |bytes: u64| bytes / block_bytes * block_bytes;
            if wild > 0 {
                held.iter_mut().for_each(|bytes| *bytes = 0);
                held[node] = whole(plugged.min(max));
            }
            Device {
                node,
                block_bytes,
                max_bytes: max,
                requested_bytes: whole(requested.min(max)),
                plugged_bytes: whole(plugged.min(max)),
                held_bytes: held,
                scattered_bytes: if wild == 1 { scattered } else { 0 },
                done: Order(0),
                is_heard: wild != 2,
            }
        })
}

fn any_vm(nodes: usize, id: u64) -> impl Strategy<Value = Vm> {
    let devices: Vec<_> = (0..nodes).map(|node| any_device(nodes, node).boxed()).collect();
    let base = prop::collection::vec(prop_oneof![Just(0), blocks(20)], nodes);
    let harvest = prop::option::of((blocks(80), devices));
    (base, any_cores(), harvest).prop_map(move |(base_bytes, cores, harvest)| {
        let base: u64 = base_bytes.iter().sum();
        let harvest = harvest.map(|(more, devices)| Harvest { max_bytes: base + more, devices });
        Vm { id: VmId(id), base_bytes, cores, harvest }
    })
}

/// Half of them take no part in the division of cores.
fn any_cores() -> impl Strategy<Value = u32> {
    prop_oneof![Just(0), 1u32..6]
}

prop_compose! {
    fn any_elastic()(limit in blocks(30), used in blocks(30)) -> Elastic {
        Elastic { limit_bytes: limit, used_bytes: used.min(limit), done: Order(0) }
    }
}

prop_compose! {
    fn any_node()(
        total in 20u64..300,
        system in 0u64..40,
        lend_cap_bytes in blocks(60),
        lent in any_elastic(),
        ephemeral in any_elastic(),
    ) -> NumaNode {
        let (total_bytes, system_bytes) = (total * BLOCK, system * BLOCK / 2);
        NumaNode { total_bytes, system_bytes, lend_cap_bytes, lent, ephemeral }
    }
}

fn any_newcomer(nodes: usize, id: u64) -> impl Strategy<Value = Newcomer> {
    const KINDS: [NewcomerKind; 3] =
        [NewcomerKind::Regular, NewcomerKind::Spot, NewcomerKind::Harvest];
    let node = prop::option::of(0..nodes + 1);
    (prop::sample::select(&KINDS[..]), 0u64..200, any_cores(), node).prop_map(
        move |(kind, halves, cores, node)| Newcomer {
            id: VmId(1000 + id),
            kind,
            bytes: halves * BLOCK / 2,
            cores,
            node: node.filter(|_| id.is_multiple_of(3)),
        },
    )
}

fn any_host() -> impl Strategy<Value = Host> {
    (1usize..4, 0u64..5, 0u64..6).prop_flat_map(|(nodes, vms, waiting)| {
        let vms: Vec<_> = (0..vms).map(|id| any_vm(nodes, id).boxed()).collect();
        let waiting: Vec<_> = (0..waiting).map(|id| any_newcomer(nodes, id).boxed()).collect();
        let nodes = prop::collection::vec(any_node(), nodes);
        (nodes, 0u32..20, vms, waiting).prop_map(|(nodes, cores, vms, waiting)| Host {
            nodes,
            cores,
            vms,
            waiting,
        })
    })
}

/// Most bytes of a node that may be taken when all of these are allowed, counted by hand.
fn promised(host: &Host, node: usize, allowed: &Allowed) -> u64 {
    let n = &host.nodes[node];
    let lent = allowed.lent.get(&node).copied().unwrap_or(0);
    let ephemeral = allowed.ephemeral.get(&node).copied().unwrap_or(0);
    let mut sum = n.system_bytes.min(n.total_bytes)
        + n.lent.limit_bytes.max(n.lent.used_bytes).max(lent)
        + n.ephemeral.limit_bytes.max(n.ephemeral.used_bytes).max(ephemeral);
    for vm in &host.vms {
        sum += vm.base_bytes[node];
        for device in vm.devices() {
            if device.node == node {
                let may = allowed.devices.get(&(vm.id, node)).copied().unwrap_or(0);
                let may = may.max(device.requested_bytes).max(device.plugged_bytes);
                sum += device.held_bytes[node].max(may) + device.scattered_bytes;
            } else {
                sum += device.held_bytes[node];
            }
        }
    }
    sum + allowed.admitted.iter().map(|parts| parts[node]).sum::<u64>()
}

/// Cores of all machines that there are.
fn promised_cores(host: &Host) -> u64 {
    host.vms.iter().map(|vm| u64::from(vm.cores)).sum()
}

/// The most that anybody was allowed, by orders that may be carried out at any time.
#[derive(Default)]
struct Allowed {
    devices: BTreeMap<(VmId, usize), u64>,
    lent: BTreeMap<usize, u64>,
    ephemeral: BTreeMap<usize, u64>,
    admitted: Vec<Vec<u64>>,
}

impl Allowed {
    fn add(&mut self, actions: &[Action]) {
        for action in actions {
            match *action {
                Action::Grow { vm, node, requested_bytes, .. }
                | Action::Shrink { vm, node, requested_bytes, .. } => {
                    let before = self.devices.insert((vm, node), requested_bytes);
                    assert_eq!(before, None, "a second order before the first was done");
                }
                Action::Lend { node, limit_bytes, .. }
                | Action::Recall { node, limit_bytes, .. } => {
                    assert_eq!(self.lent.insert(node, limit_bytes), None);
                }
                Action::Ephemeral { node, limit_bytes, .. } => {
                    assert_eq!(self.ephemeral.insert(node, limit_bytes), None);
                }
                Action::Admit { ref base_bytes, .. } => self.admitted.push(base_bytes.clone()),
                _ => {}
            }
        }
    }
}

fn admit(host: &mut Host, actions: &[Action], allowed: &mut Allowed) {
    for action in actions {
        if let Action::Admit { vm, base_bytes } = action {
            let at = host.waiting.iter().position(|waiting| waiting.id == *vm).expect("it waits");
            let cores = host.waiting.remove(at).cores;
            host.vms.push(Vm { id: *vm, base_bytes: base_bytes.clone(), cores, harvest: None });
            allowed.admitted.clear();
        }
    }
}

proptest! {
    /// Every byte is in one class, and no order takes what is somebody else's, also when nobody has
    /// carried out any order yet.
    #[test]
    fn nothing_is_promised_twice(
        settings in any_settings(),
        host in any_host(),
        seconds in prop::collection::vec(0u64..40, 1..6),
    ) {
        let mut broker = Broker::new(settings).unwrap();
        let mut host = host;
        let mut allowed = Allowed::default();
        let before: Vec<u64> =
            (0..host.nodes.len()).map(|n| promised(&host, n, &allowed)).collect();
        let cores_before = promised_cores(&host);
        let mut now = Duration::ZERO;
        for step in seconds {
            let actions = broker.step(&host, now);
            allowed.add(&actions);
            for (n, node) in broker.ledger().nodes.iter().enumerate() {
                prop_assert_eq!(node.sum_bytes(), node.total_bytes + node.overdrawn_bytes);
                let now = promised(&host, n, &allowed);
                prop_assert!(now <= node.total_bytes.max(before[n]), "node {}: {:?}", n, actions);
                prop_assert_eq!(now.saturating_sub(node.total_bytes), node.overdrawn_bytes);
            }
            admit(&mut host, &actions, &mut allowed);
            let cores = broker.ledger().cores;
            let total = u64::from(host.cores);
            let promised = promised_cores(&host);
            prop_assert_eq!((cores.total, cores.sum()), (total, total + cores.overdrawn));
            prop_assert_eq!(cores.regular + cores.minimum, promised);
            prop_assert!(promised <= total.max(cores_before), "{:?}", actions);
            prop_assert_eq!(promised.saturating_sub(total), cores.overdrawn);
            now += Duration::from_secs(step);
        }
    }

    /// Orders can be carried out: sizes are whole blocks, and nobody's maximum is passed.
    #[test]
    fn orders_can_be_carried_out(settings in any_settings(), host in any_host()) {
        let mut broker = Broker::new(settings).unwrap();
        let urgent = host.waiting.iter().any(|newcomer| newcomer.kind != NewcomerKind::Harvest);
        let mut last = Order(0);
        for action in broker.step(&host, Duration::ZERO) {
            match action {
                Action::Grow { vm, node, requested_bytes, order }
                | Action::Shrink { vm, node, requested_bytes, order, .. } => {
                    prop_assert!(order > last);
                    last = order;
                    let vm = host.vms.iter().find(|other| other.id == vm).unwrap();
                    let device = vm.devices().iter().find(|d| d.node == node).unwrap();
                    prop_assert_eq!(requested_bytes % device.block_bytes, 0);
                    prop_assert!(requested_bytes <= device.max_bytes);
                    let grows = requested_bytes > device.requested_bytes;
                    prop_assert_eq!(matches!(action, Action::Grow { .. }), grows);
                }
                Action::Lend { node, limit_bytes, .. } => {
                    let Elastic { limit_bytes: before, used_bytes, .. } = host.nodes[node].lent;
                    prop_assert!(limit_bytes >= used_bytes);
                    let most = host.nodes[node].lend_cap_bytes;
                    prop_assert!(limit_bytes <= most.max(before).max(used_bytes), "{:?}", action);
                }
                Action::Recall { node, limit_bytes, .. } => {
                    prop_assert!(limit_bytes < host.nodes[node].lent.used_bytes);
                }
                Action::Warn { .. } => prop_assert!(urgent, "nobody needs anybody's minimum"),
                Action::Evict { .. } => prop_assert!(false, "at once: {:?}", action),
                Action::Admit { ref base_bytes, .. } => {
                    prop_assert!(base_bytes.iter().sum::<u64>() > 0);
                }
                _ => {}
            }
        }
    }

    /// When all do as they are asked it ends, with everybody served who can be, a full buffer
    /// wherever somebody has what it lacks, and nobody beyond the maximum.
    #[test]
    fn it_comes_to_rest(settings in any_settings(), host in any_host()) {
        let settings = Settings { least_change_bytes: 0, ..settings };
        let mut broker = Broker::new(settings.clone()).unwrap();
        let mut host = host;
        let mut now = Duration::ZERO;
        let mut quiet = 0;
        for _ in 0..3000 {
            let mut actions = broker.step(&host, now);
            actions.retain(|action| !matches!(action, Action::Spare { .. }));
            quiet = if actions.is_empty() { quiet + 1 } else { 0 };
            if quiet > 60 {
                break;
            }
            carry_out(&mut host, &actions, 100 * BLOCK);
            for vm in &mut host.vms {
                for device in vm.harvest.iter_mut().flat_map(|harvest| &mut harvest.devices) {
                    // A guest that had not done yet what it was asked for.
                    device.plugged_bytes = device.requested_bytes;
                    device.held_bytes.iter_mut().for_each(|bytes| *bytes = 0);
                    device.held_bytes[device.node] = device.requested_bytes;
                    device.scattered_bytes = 0;
                    device.is_heard = true;
                }
            }
            now += Duration::from_secs(1);
        }
        prop_assert!(quiet > 60, "it never rests");
        for waiting in &host.waiting {
            prop_assert_eq!(waiting.kind, NewcomerKind::Harvest, "{:?}", broker.waiting().next());
        }
        let parts: Vec<u64> = broker.ledger().nodes.iter().map(|node| node.buffer_bytes).collect();
        for (n, node) in broker.ledger().nodes.iter().enumerate() {
            if settings.even_buffer && node.overdrawn_bytes == 0 {
                let gives = node.harvested_bytes + node.ephemeral_bytes;
                let chunks = settings.buffer_bytes / BLOCK;
                let least = chunks / parts.len() as u64 * BLOCK;
                let block = BLOCK << 2;
                prop_assert!(gives <= block || node.buffer_bytes >= least, "node {}: {:?}", n, node);
            }
        }
        for (n, node) in host.nodes.iter().enumerate() {
            // Donors have no more than they could lend, and nothing is left over that they could.
            let rest = broker.ledger().nodes[n].unassigned_bytes;
            let room = node.lend_cap_bytes.saturating_sub(node.lent.limit_bytes);
            prop_assert!(rest.min(room) < BLOCK, "node {}: {:?}", n, broker.ledger().nodes[n]);
            prop_assert!(node.lent.limit_bytes <= node.lend_cap_bytes.max(node.lent.used_bytes));
        }
        for vm in &host.vms {
            let Some(harvest) = &vm.harvest else { continue };
            let plugged: u64 = vm.devices().iter().map(|device| device.plugged_bytes).sum();
            prop_assert!(vm.base_total() + plugged <= harvest.max_bytes.max(vm.base_total()));
        }
    }
}
