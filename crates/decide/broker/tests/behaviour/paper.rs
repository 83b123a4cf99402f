//! Tests the broker against the paper: figure 5, and sections 4.3 and 4.4.

use crate::common::{G, carry_out, device_mut, harvest_vm, harvested, host, newcomer, settle};
use hecaton_broker::{
    Action, Broker, EvictWhy, Host, Newcomer, NewcomerKind, NodeLedger, RefuseWhy, Settings, VmId,
    Waits,
};
use std::time::Duration;

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn broker(buffer: u64) -> Broker {
    Broker::new(Settings { buffer_bytes: buffer, ..Settings::default() }).unwrap()
}

/// The paper's example: 256 GB, a buffer of 32 GB, a harvest VM with a minimum of 64 GB.
#[test]
fn figure_5() {
    let mut broker = broker(32 * G);
    let mut host = host(1, 256 * G);
    host.waiting.push(newcomer(1, NewcomerKind::Regular, 64 * G));
    host.waiting.push(newcomer(2, NewcomerKind::Regular, 64 * G));
    settle(&mut broker, &mut host, s(0), 256 * G);
    // t0
    host.waiting.push(newcomer(9, NewcomerKind::Harvest, 64 * G));
    settle(&mut broker, &mut host, s(0), 256 * G);
    assert_eq!(harvested(&host, 9) / G, 32, "64 are unallocated, and the buffer stays");
    // t1
    host.vms.retain(|vm| vm.id != VmId(2));
    settle(&mut broker, &mut host, s(1), 256 * G);
    assert_eq!(harvested(&host, 9) / G, 96);
    // t2: 32 come from the buffer, and the VM waits for 64.
    host.waiting.push(newcomer(3, NewcomerKind::Regular, 96 * G));
    let actions = broker.step(&host, s(2));
    assert!(!actions.iter().any(|action| matches!(action, Action::Admit { .. })), "{actions:?}");
    let (_, _, waits) = broker.waiting().next().unwrap();
    assert_eq!(waits, Waits::ForMemory { missing_bytes: 64 * G });
    carry_out(&mut host, &actions, 256 * G);
    settle(&mut broker, &mut host, s(2), 256 * G);
    assert_eq!(harvested(&host, 9), 0, "it is at its minimum, and the buffer is full again");
    assert_eq!(broker.ledger().nodes[0].buffer_bytes / G, 32);
    // t3: the whole buffer is used. No VM is asked to shrink, as none holds harvested memory.
    host.waiting.push(newcomer(4, NewcomerKind::Regular, 32 * G));
    let actions = settle(&mut broker, &mut host, s(3), 256 * G);
    assert_eq!(actions.len(), 1, "{actions:?}");
    assert!(matches!(actions[0], Action::Admit { vm: VmId(4), .. }));
    assert_eq!(broker.ledger().nodes[0].buffer_bytes, 0);
    // t4: the minimum is needed: a warning, a clean shutdown, an end.
    host.waiting.push(newcomer(5, NewcomerKind::Regular, 32 * G));
    let actions = settle(&mut broker, &mut host, s(4), 256 * G);
    assert_eq!(actions, [Action::Warn { vm: VmId(9), deadline: s(34) }]);
    assert!(broker.step(&host, s(13)).is_empty());
    let actions = broker.step(&host, s(14));
    assert_eq!(actions, [Action::ShutDown { vm: VmId(9), deadline: s(34) }]);
    assert!(broker.step(&host, s(33)).is_empty());
    let actions = settle(&mut broker, &mut host, s(34), 256 * G);
    assert!(
        matches!(
            actions[..],
            [
                Action::Evict { vm: VmId(9), why: EvictWhy::MinimumNeeded },
                Action::Admit { vm: VmId(5), .. }
            ]
        ),
        "{actions:?}"
    );
    let node = NodeLedger {
        total_bytes: 256 * G,
        regular_bytes: 224 * G,
        buffer_bytes: 32 * G,
        ..NodeLedger::default()
    };
    assert_eq!(broker.ledger().nodes, [node]);
    // The evicted VM is wanted back, and returns when there is room again and 60 s have passed.
    host.waiting.push(newcomer(9, NewcomerKind::Harvest, 64 * G));
    settle(&mut broker, &mut host, s(35), 256 * G);
    host.vms.retain(|vm| vm.id != VmId(3));
    assert!(settle(&mut broker, &mut host, s(93), 256 * G).is_empty());
    assert_eq!(broker.waiting().next().unwrap().2, Waits::AfterEviction);
    settle(&mut broker, &mut host, s(94), 256 * G);
    assert_eq!(harvested(&host, 9) / G, 32);
}

/// A warning is lifted when the minimum is not needed after all.
#[test]
fn who_is_not_needed_is_spared() {
    let mut broker = broker(0);
    let mut host = host(1, 8 * G);
    host.vms.push(harvest_vm(9, 1, vec![4 * G], 8 * G));
    host.waiting.push(newcomer(1, NewcomerKind::Regular, 6 * G));
    let actions = settle(&mut broker, &mut host, s(0), 8 * G);
    assert_eq!(actions, [Action::Warn { vm: VmId(9), deadline: s(30) }]);
    host.waiting.clear();
    let actions = broker.step(&host, s(9));
    assert_eq!(actions[0], Action::Spare { vm: VmId(9) });
    assert!(matches!(actions[1], Action::Grow { vm: VmId(9), .. }), "{actions:?}");
    assert_eq!(broker.counters().spared, 1);
}

/// A VM with twice the minimum harvests twice as much, and no VM exceeds its maximum.
#[test]
fn shares_are_in_proportion_to_the_minima() {
    let mut broker = broker(4 * G);
    let mut host = host(1, 64 * G);
    host.vms.push(harvest_vm(1, 1, vec![8 * G], 64 * G));
    host.vms.push(harvest_vm(2, 1, vec![4 * G], 64 * G));
    settle(&mut broker, &mut host, s(0), 0);
    assert_eq!((harvested(&host, 1) / G, harvested(&host, 2) / G), (32, 16));
    host.vms[0].harvest.as_mut().unwrap().max_bytes = 18 * G;
    settle(&mut broker, &mut host, s(1), 0);
    assert_eq!((harvested(&host, 1) / G, harvested(&host, 2) / G), (10, 38));
}

/// A new VM waits only for what the buffer lacks; several VMs give at the same time, in batches.
#[test]
fn several_give_at_the_same_time_in_batches() {
    for (parallel, asked) in [(true, 2), (false, 1)] {
        let settings = Settings { parallel, ..Settings::default() };
        let mut broker = Broker::new(settings).unwrap();
        let mut host = host(1, 32 * G);
        for vm in [1, 2] {
            host.vms.push(harvest_vm(vm, 1, vec![4 * G], 32 * G));
        }
        settle(&mut broker, &mut host, s(0), 0);
        host.waiting.push(newcomer(3, NewcomerKind::Regular, 8 * G));
        let actions = broker.step(&host, s(1));
        assert_eq!(actions.len(), asked, "{actions:?}");
        for action in &actions {
            let Action::Shrink { requested_bytes, target_bytes, .. } = action else {
                panic!("{action:?}");
            };
            assert_eq!((requested_bytes / G, target_bytes / G), (11, 8));
        }
        assert!(broker.step(&host, s(1)).is_empty(), "one order at a time");
        carry_out(&mut host, &actions, 0);
        settle(&mut broker, &mut host, s(1), 0);
        assert!(host.vms.iter().any(|vm| vm.id == VmId(3)));
        assert_eq!((harvested(&host, 1) / G, harvested(&host, 2) / G), (8, 8));
    }
}

/// A VM with twice the minimum keeps twice as much, and all give at the same time. A VM with a
/// maximum gives only what is beyond its part.
#[test]
fn they_give_in_proportion_to_their_minima() {
    for (max, before, after) in [(64, [32, 16], [24, 12]), (18, [10, 38], [10, 26])] {
        let mut broker = broker(4 * G);
        let mut host = host(1, 64 * G);
        host.vms.push(harvest_vm(1, 1, vec![8 * G], max * G));
        host.vms.push(harvest_vm(2, 1, vec![4 * G], 64 * G));
        settle(&mut broker, &mut host, s(0), 0);
        assert_eq!([1, 2].map(|vm| harvested(&host, vm) / G), before);
        host.waiting.push(newcomer(3, NewcomerKind::Regular, 12 * G));
        let asked: Vec<VmId> = broker
            .step(&host, s(1))
            .into_iter()
            .filter_map(|action| match action {
                Action::Shrink { vm, .. } => Some(vm),
                _ => None,
            })
            .collect();
        let gives = |vm: usize| before[vm] > after[vm];
        let expected: Vec<VmId> =
            (0..2).filter(|vm| gives(*vm)).map(|vm| VmId(vm as u64 + 1)).collect();
        assert_eq!(asked, expected);
        // The requests are lost with their broker; the next broker continues from what it finds.
        let mut broker = self::broker(4 * G);
        settle(&mut broker, &mut host, s(1), 0);
        assert_eq!([1, 2].map(|vm| harvested(&host, vm) / G), after);
        assert_eq!(broker.ledger().nodes[0].buffer_bytes, 4 * G, "the buffer is full again");
    }
}

/// VMs arrive each second, and memory comes back more slowly: no VM overtakes an earlier one. The
/// harvest VM, which gives all the time, is not evicted early.
#[test]
fn arrivals_faster_than_reclaiming_are_served_in_their_order() {
    let mut broker = broker(2 * G);
    let mut host = host(1, 64 * G);
    host.vms.push(harvest_vm(9, 1, vec![4 * G], 64 * G));
    settle(&mut broker, &mut host, s(0), 0);
    let mut admitted = Vec::new();
    for second in 1..=28 {
        if second <= 12 {
            host.waiting.push(newcomer(10 + second, NewcomerKind::Regular, 2 * G));
        }
        for action in broker.step(&host, s(second)) {
            match action {
                Action::Shrink { vm, node, requested_bytes, order, .. } => {
                    let device = device_mut(&mut host, vm, node);
                    (device.requested_bytes, device.done) = (requested_bytes, order);
                }
                Action::Admit { vm, .. } => {
                    admitted.push(vm.0);
                    carry_out(&mut host, &[action], 0);
                }
                other => panic!("nothing of the kind is called for: {other:?}"),
            }
        }
        // The guest gives 1 GiB a second, half of what the arriving VMs need.
        let device = device_mut(&mut host, VmId(9), 0);
        device.plugged_bytes = device.requested_bytes.max(device.plugged_bytes.saturating_sub(G));
        device.held_bytes[0] = device.plugged_bytes;
    }
    assert_eq!(admitted, (11..=22).collect::<Vec<u64>>());
}

/// With an even buffer, a VM for any node starts without waiting.
#[test]
fn an_even_buffer_is_there_for_machines_of_each_node() {
    for (even_buffer, waits) in [(true, 0), (false, 1)] {
        let settings = Settings { buffer_bytes: 8 * G, even_buffer, ..Settings::default() };
        let mut broker = Broker::new(settings).unwrap();
        let mut host = host(2, 16 * G);
        host.vms.push(harvest_vm(9, 2, vec![2 * G, 2 * G], 64 * G));
        settle(&mut broker, &mut host, s(0), 0);
        for node in [0, 1] {
            let newcomer = newcomer(node as u64 + 1, NewcomerKind::Regular, 4 * G);
            host.waiting.push(hecaton_broker::Newcomer { node: Some(node), ..newcomer });
        }
        let actions = broker.step(&host, s(1));
        let admitted = actions.iter().filter(|action| matches!(action, Action::Admit { .. }));
        assert_eq!((admitted.count(), broker.waiting().count()), (2 - waits, waits));
    }
}

/// A regular VM stays within one node, even if that takes an eviction; the buffer is even.
#[test]
fn regular_vms_stay_within_a_node() {
    let mut broker = broker(4 * G);
    let mut host = host(2, 16 * G);
    host.vms.push(harvest_vm(9, 2, vec![8 * G, 0], 64 * G));
    settle(&mut broker, &mut host, s(0), 0);
    let ledger = broker.ledger().clone();
    assert_eq!([0, 1].map(|n| ledger.nodes[n].buffer_bytes / G), [2, 2]);
    assert_eq!([0, 1].map(|n| ledger.nodes[n].harvested_bytes / G), [6, 14]);
    // The buffers and the harvested memory of both nodes together have 12 G; node 1 alone has 12 G
    // as well.
    host.waiting.push(newcomer(1, NewcomerKind::Regular, 12 * G));
    settle(&mut broker, &mut host, s(1), 0);
    assert_eq!(host.vms[1].base_bytes, [0, 12 * G]);
    // Only node 0 can give 12 G, and only together with the harvest VM's minimum.
    host.waiting.push(newcomer(2, NewcomerKind::Regular, 12 * G));
    let actions = settle(&mut broker, &mut host, s(2), 0);
    assert!(actions.contains(&Action::Warn { vm: VmId(9), deadline: s(32) }), "{actions:?}");
    settle(&mut broker, &mut host, s(22), 0);
    settle(&mut broker, &mut host, s(32), 0);
    assert_eq!(host.vms[1].base_bytes, [12 * G, 0]);
    assert_eq!(broker.counters().spanning, 0);
    // 4 G are left on each node: a larger VM spans both, or is refused if it requires one node.
    host.waiting.push(hecaton_broker::Newcomer {
        node: Some(0),
        ..newcomer(3, NewcomerKind::Regular, 6 * G)
    });
    let actions = settle(&mut broker, &mut host, s(33), 0);
    let why = RefuseWhy::NoRoom { bytes: 6 * G, reachable_bytes: 4 * G };
    assert_eq!(actions, [Action::Refuse { vm: VmId(3), why }]);
    host.waiting.push(newcomer(4, NewcomerKind::Regular, 6 * G));
    settle(&mut broker, &mut host, s(34), 0);
    assert_eq!(host.vms[2].base_bytes, [4 * G, 2 * G]);
    assert_eq!(broker.counters().spanning, 1);
}

/// Each of the four failures to give ends in an eviction, four times as late for a spot VM.
#[test]
fn who_fails_a_newcomer_is_evicted_at_once() {
    let cases = [
        (EvictWhy::NotEnough, 5),
        (EvictWhy::TooSlow, 30),
        (EvictWhy::NotContiguous, 5),
        (EvictWhy::WrongNode, 5),
    ];
    for (why, seconds) in cases {
        for (kind, factor) in [(NewcomerKind::Regular, 1), (NewcomerKind::Spot, 4)] {
            let mut broker = broker(0);
            let mut host = host(2, 16 * G);
            host.vms.push(harvest_vm(9, 2, vec![2 * G, 2 * G], 32 * G));
            settle(&mut broker, &mut host, s(0), 0);
            if why == EvictWhy::WrongNode {
                // Half of device 0's memory is on node 1, where device 1 gave as much back.
                device_mut(&mut host, VmId(9), 0).held_bytes = vec![7 * G, 7 * G];
                let other = device_mut(&mut host, VmId(9), 1);
                (other.requested_bytes, other.plugged_bytes) = (7 * G, 7 * G);
                other.held_bytes = vec![0, 7 * G];
            }
            host.waiting
                .push(hecaton_broker::Newcomer { node: Some(1), ..newcomer(1, kind, 10 * G) });
            let mut killed = None;
            for second in 1..200 {
                let actions = broker.step(&host, s(second));
                if let Some(Action::Evict { why, .. }) =
                    actions.iter().find(|action| matches!(action, Action::Evict { .. }))
                {
                    killed = Some((*why, second - 1));
                    break;
                }
                for action in actions {
                    let Action::Shrink { vm, node, requested_bytes, order, .. } = action else {
                        continue;
                    };
                    let device = device_mut(&mut host, vm, node);
                    device.requested_bytes = requested_bytes;
                    device.done = order;
                    match why {
                        EvictWhy::NotContiguous => {
                            device.scattered_bytes += device.plugged_bytes - requested_bytes;
                            device.plugged_bytes = requested_bytes;
                            device.held_bytes[node] = requested_bytes;
                        }
                        EvictWhy::WrongNode if node == 1 => {
                            device.plugged_bytes = requested_bytes;
                            device.held_bytes[node] = requested_bytes;
                        }
                        _ => {}
                    }
                }
                if why == EvictWhy::TooSlow {
                    let device = device_mut(&mut host, VmId(9), 1);
                    device.plugged_bytes -= crate::common::BLOCK;
                    device.held_bytes[1] -= crate::common::BLOCK;
                }
            }
            assert_eq!(killed, Some((why, seconds * factor)), "{kind:?}");
        }
    }
}

/// No VM is evicted for the buffer: others give instead of a VM that hangs, until it gives too.
#[test]
fn others_fill_the_buffer_for_one_that_hangs() {
    let mut broker = broker(8 * G);
    let mut host = host(1, 32 * G);
    for vm in [1, 2] {
        host.vms.push(harvest_vm(vm, 1, vec![4 * G], 32 * G));
    }
    settle(&mut broker, &mut host, s(0), 0);
    assert_eq!((harvested(&host, 1) / G, harvested(&host, 2) / G), (8, 8));
    host.waiting.push(newcomer(3, NewcomerKind::Regular, 4 * G));
    for second in 1..60 {
        let (mine, others): (Vec<Action>, Vec<Action>) = broker
            .step(&host, s(second))
            .into_iter()
            .partition(|action| matches!(action, Action::Shrink { vm: VmId(1), .. }));
        assert!(!others.iter().any(|action| matches!(action, Action::Evict { .. })), "{others:?}");
        carry_out(&mut host, &others, 0);
        for action in mine {
            let Action::Shrink { vm, node, requested_bytes, order, .. } = action else { continue };
            let device = device_mut(&mut host, vm, node);
            (device.requested_bytes, device.done) = (requested_bytes, order);
        }
        let buffer = broker.ledger().nodes[0].buffer_bytes / G;
        assert!(second < 30 || buffer == 8, "{buffer} G after {second} s");
    }
    assert_eq!((harvested(&host, 1) / G, harvested(&host, 2) / G), (8, 4));
    let device = device_mut(&mut host, VmId(1), 0);
    device.plugged_bytes = device.requested_bytes;
    device.held_bytes[0] = device.requested_bytes;
    settle(&mut broker, &mut host, s(60), 0);
    assert_eq!((harvested(&host, 1) / G, harvested(&host, 2) / G), (6, 6));
}

/// Free lent extents give first. Extents in use give after harvest VMs, never for the buffer.
#[test]
fn lent_extents_give_in_their_turn() {
    let settings =
        Settings { buffer_bytes: 2 * G, ephemeral_cap_bytes: 4 * G, ..Settings::default() };
    let mut broker = Broker::new(settings).unwrap();
    let mut host = host(1, 32 * G);
    host.nodes[0].lend_cap_bytes = 8 * G;
    host.vms.push(harvest_vm(9, 1, vec![4 * G], 16 * G));
    settle(&mut broker, &mut host, s(0), 0);
    let classes = |broker: &Broker| {
        let n = broker.ledger().nodes[0];
        [n.buffer_bytes, n.lent_free_bytes, n.ephemeral_bytes, n.harvested_bytes, n.lent_used_bytes]
            .map(|bytes| bytes / G)
    };
    assert_eq!(classes(&broker), [2, 8, 4, 12, 0]);
    host.nodes[0].lent.used_bytes = 6 * G;
    settle(&mut broker, &mut host, s(1), 0);
    assert_eq!(classes(&broker), [2, 2, 4, 12, 6]);
    let mut id = 10;
    let mut come = |broker: &mut Broker, bytes: u64| {
        id += 1;
        host.waiting.push(newcomer(id, NewcomerKind::Regular, bytes));
        settle(broker, &mut host, s(2), 0);
        classes(broker)
    };
    assert_eq!(come(&mut broker, 4 * G), [2, 0, 4, 12, 6], "what was free is the buffer's again");
    assert_eq!(come(&mut broker, 6 * G), [2, 0, 0, 10, 6]);
    assert_eq!(come(&mut broker, 8 * G), [2, 0, 0, 2, 6]);
    assert_eq!(come(&mut broker, 2 * G), [2, 0, 0, 0, 6]);
    assert_eq!(come(&mut broker, 2 * G), [0, 0, 0, 0, 6], "nothing is moved for the buffer");
    assert_eq!(come(&mut broker, 4 * G), [0, 0, 0, 0, 2]);
}

/// Each node lends its own memory, up to its donors' limit, and recalls it only for VMs on that
/// node.
#[test]
fn each_node_lends_for_itself() {
    let mut broker = Broker::new(Settings { buffer_bytes: 4 * G, ..Settings::default() }).unwrap();
    let mut host = host(3, 16 * G);
    host.nodes[0].lend_cap_bytes = 8 * G;
    host.nodes[1].lend_cap_bytes = 20 * G;
    settle(&mut broker, &mut host, s(0), 0);
    let lends = |host: &Host| [0, 1, 2].map(|n| host.nodes[n].lent.limit_bytes);
    let part = broker.ledger().nodes[1].buffer_bytes;
    assert_eq!(lends(&host), [8 * G, 16 * G - part, 0]);
    host.nodes[0].lent.used_bytes = 6 * G;
    host.nodes[1].lent.used_bytes = 10 * G;
    let on_1 = Newcomer { node: Some(1), ..newcomer(1, NewcomerKind::Regular, 12 * G) };
    host.waiting.push(on_1);
    let actions = settle(&mut broker, &mut host, s(1), 0);
    let recalled = |action: &Action| match action {
        Action::Recall { node, .. } => Some(*node),
        _ => None,
    };
    assert_eq!(actions.iter().filter_map(recalled).collect::<Vec<_>>(), [1]);
    assert_eq!(lends(&host), [8 * G, 4 * G, 0]);
    assert_eq!(host.vms[0].base_bytes, [0, 12 * G, 0]);
    for node in &broker.ledger().nodes {
        assert_eq!((node.sum_bytes(), node.overdrawn_bytes), (16 * G, 0));
    }
}

/// The refusal of a required node says what it has left, and whether another node has room.
#[test]
fn a_node_that_is_full_is_named_apart_from_a_full_host() {
    let mut broker = Broker::new(Settings::default()).unwrap();
    let mut host = host(2, 16 * G);
    let on_0 = |id, bytes| Newcomer { node: Some(0), ..newcomer(id, NewcomerKind::Regular, bytes) };
    host.waiting.push(on_0(1, 12 * G));
    settle(&mut broker, &mut host, s(0), 0);
    let mut refused = |bytes: u64| {
        host.waiting.push(on_0(2, bytes));
        let actions = settle(&mut broker, &mut host, s(0), 0);
        let why = actions.iter().find_map(|action| match action {
            Action::Refuse { why, .. } => Some(why.to_string()),
            _ => None,
        });
        why.expect("it is refused")
    };
    let words = refused(8 * G);
    assert!(words.contains("8G") && words.contains("4G are left there"), "{words}");
    assert!(words.contains("another node of this host has 16G"), "{words}");
    let words = refused(20 * G);
    assert!(words.contains("choose another host"), "{words}");
}

/// A VM at its maximum gives on one node before it grows on another.
#[test]
fn a_maximum_goes_for_all_nodes_at_any_moment() {
    let mut broker = Broker::new(Settings::default()).unwrap();
    let mut host = host(2, 16 * G);
    host.vms.push(harvest_vm(9, 2, vec![4 * G, 0], 16 * G));
    for node in [0, 1] {
        let on = Newcomer {
            node: Some(node),
            ..newcomer(10 + node as u64, NewcomerKind::Regular, 11 * G)
        };
        host.waiting.push(on);
        settle(&mut broker, &mut host, s(0), 0);
    }
    assert_eq!(harvested(&host, 9), 6 * G);
    // VM 11 leaves node 1, then VM 10 leaves node 0; the harvest VM moves between the nodes.
    host.vms.retain(|vm| vm.id != VmId(11));
    settle(&mut broker, &mut host, s(1), 0);
    host.vms.retain(|vm| vm.id != VmId(10));
    for second in 2..60 {
        let actions = broker.step(&host, s(second));
        for action in &actions {
            let Action::Grow { node, requested_bytes, .. } = action else { continue };
            let others = host.vms[0].devices().iter().filter(|device| device.node != *node);
            let others: u64 = others.map(|device| device.plugged_bytes).sum();
            assert!(4 * G + others + requested_bytes <= 16 * G, "{actions:?}");
        }
        carry_out(&mut host, &actions, 0);
    }
    assert_eq!(harvested(&host, 9), 12 * G);
}

/// The quota of harvest VMs also holds for waiting VMs.
#[test]
fn there_are_no_more_harvest_vms_than_may_be() {
    let settings = Settings { harvest_quota: 1, ..Settings::default() };
    let mut broker = Broker::new(settings).unwrap();
    let mut host = host(1, 32 * G);
    host.waiting.push(newcomer(1, NewcomerKind::Harvest, 4 * G));
    host.waiting.push(newcomer(2, NewcomerKind::Harvest, 4 * G));
    settle(&mut broker, &mut host, s(0), 8 * G);
    assert_eq!(host.vms.len(), 1);
    assert_eq!(broker.waiting().next().unwrap().2, Waits::ForQuota);
    host.vms.clear();
    settle(&mut broker, &mut host, s(0), 8 * G);
    assert_eq!(host.vms[0].id, VmId(2));
}
