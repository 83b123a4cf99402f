//! Cores: who has them, who waits for them, and who goes for them.

use crate::common::{G, harvest_vm, harvested, host, newcomer, settle};
use hecaton_broker::{
    Action, Broker, CoreLedger, EvictWhy, Host, Newcomer, NewcomerKind, RefuseWhy, Settings, VmId,
    Waits,
};
use std::time::Duration;

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn broker() -> Broker {
    Broker::new(Settings::default()).unwrap()
}

fn with_cores(id: u64, kind: NewcomerKind, bytes: u64, cores: u32) -> Newcomer {
    Newcomer { cores, ..newcomer(id, kind, bytes) }
}

/// A host of 64 GiB and so many cores, with a harvest VM (9) of a minimum of 8 GiB and 4 cores.
fn harvested_host(cores: u32) -> Host {
    let mut host = Host { cores, ..host(1, 64 * G) };
    let mut vm = harvest_vm(9, 1, vec![8 * G], 64 * G);
    vm.cores = 4;
    host.vms.push(vm);
    host
}

fn waits(broker: &Broker, vm: u64) -> Option<Waits> {
    broker.waiting().find(|(id, ..)| *id == VmId(vm)).map(|(_, _, waits)| waits)
}

/// Cores beyond the minimum are had at once, and nobody is asked for any; the minimum by an
/// eviction, as of memory.
#[test]
fn a_minimum_of_cores_is_had_by_an_eviction() {
    let mut broker = broker();
    let mut host = harvested_host(16);
    settle(&mut broker, &mut host, s(0), 0);
    assert_eq!(harvested(&host, 9) / G, 56);
    host.waiting.push(with_cores(1, NewcomerKind::Regular, 4 * G, 12));
    settle(&mut broker, &mut host, s(1), 0);
    let mut ledger = CoreLedger { total: 16, regular: 12, minimum: 4, ..CoreLedger::default() };
    assert_eq!(broker.ledger().cores, ledger);
    // There is memory, and no core.
    host.waiting.push(with_cores(2, NewcomerKind::Regular, 4 * G, 3));
    let actions = settle(&mut broker, &mut host, s(2), 0);
    assert!(actions.contains(&Action::Warn { vm: VmId(9), deadline: s(32) }), "{actions:?}");
    broker.step(&host, s(3));
    assert_eq!(waits(&broker, 2), Some(Waits::ForCores { missing_cores: 3 }));
    // Others do not get meanwhile what it waits for, and one that needs no cores does not wait.
    host.waiting.push(with_cores(3, NewcomerKind::Regular, 4 * G, 2));
    host.waiting.push(newcomer(4, NewcomerKind::Regular, 4 * G));
    let actions = settle(&mut broker, &mut host, s(4), 0);
    let why = RefuseWhy::NoCores { cores: 2, reachable_cores: 1 };
    assert!(actions.contains(&Action::Refuse { vm: VmId(3), why }), "{actions:?}");
    assert!(host.vms.iter().any(|vm| vm.id == VmId(4)), "{actions:?}");
    assert_eq!(waits(&broker, 2), Some(Waits::ForCores { missing_cores: 3 }));
    assert!(!settle(&mut broker, &mut host, s(11), 0).iter().any(is_about_9));
    let actions = settle(&mut broker, &mut host, s(12), 0);
    assert_eq!(actions, [Action::ShutDown { vm: VmId(9), deadline: s(32) }]);
    let actions = settle(&mut broker, &mut host, s(32), 0);
    let evicts = Action::Evict { vm: VmId(9), why: EvictWhy::MinimumNeeded };
    assert!(actions.contains(&evicts), "{actions:?}");
    ledger = CoreLedger { total: 16, regular: 15, unallocated: 1, ..CoreLedger::default() };
    assert_eq!(broker.ledger().cores, ledger);
    // It is wanted back: nobody goes for that, and it comes when there are cores.
    host.waiting.push(with_cores(9, NewcomerKind::Harvest, 8 * G, 4));
    settle(&mut broker, &mut host, s(100), 64 * G);
    assert_eq!(waits(&broker, 9), Some(Waits::ForCores { missing_cores: 3 }));
    host.vms.retain(|vm| vm.id != VmId(2));
    settle(&mut broker, &mut host, s(101), 64 * G);
    assert_eq!(broker.ledger().cores.minimum, 4);
}

fn is_about_9(action: &Action) -> bool {
    matches!(
        action,
        Action::Warn { vm: VmId(9), .. }
            | Action::Spare { vm: VmId(9) }
            | Action::ShutDown { vm: VmId(9), .. }
            | Action::Evict { vm: VmId(9), .. }
    )
}

/// The warning is lifted when cores are free before it is over.
#[test]
fn who_is_not_needed_for_cores_is_spared() {
    let mut broker = broker();
    let mut host = harvested_host(8);
    host.waiting.push(with_cores(1, NewcomerKind::Regular, 4 * G, 4));
    settle(&mut broker, &mut host, s(0), 0);
    host.waiting.push(with_cores(2, NewcomerKind::Spot, 4 * G, 2));
    let actions = settle(&mut broker, &mut host, s(1), 0);
    assert!(actions.contains(&Action::Warn { vm: VmId(9), deadline: s(31) }), "{actions:?}");
    host.vms.retain(|vm| vm.id != VmId(1));
    let actions = settle(&mut broker, &mut host, s(2), 0);
    assert!(actions.contains(&Action::Spare { vm: VmId(9) }), "{actions:?}");
    assert!(host.vms.iter().any(|vm| vm.id == VmId(2)), "{actions:?}");
}

/// As few harvest VMs go as suffice for memory and cores together.
#[test]
fn one_that_has_both_goes_alone() {
    let mut broker = broker();
    let mut host = Host { cores: 8, ..host(1, 32 * G) };
    for (id, gib, cores) in [(7, 6, 1), (8, 8, 4)] {
        let mut vm = harvest_vm(id, 1, vec![gib * G], gib * G);
        vm.cores = cores;
        host.vms.push(vm);
    }
    host.waiting.push(with_cores(1, NewcomerKind::Regular, 23 * G, 6));
    let actions = settle(&mut broker, &mut host, s(0), 0);
    assert_eq!(actions, [Action::Warn { vm: VmId(8), deadline: s(30) }]);
}

/// A VM that needs more cores than the host has is refused at once. A regular or spot VM is refused
/// too if the host's regular VMs leave too few.
#[test]
fn what_cannot_be_had_is_refused() {
    let mut broker = broker();
    let mut host = harvested_host(8);
    host.waiting.push(with_cores(1, NewcomerKind::Harvest, 4 * G, 9));
    host.waiting.push(with_cores(2, NewcomerKind::Regular, 4 * G, 9));
    host.waiting.push(with_cores(3, NewcomerKind::Regular, 4 * G, 6));
    host.waiting.push(with_cores(4, NewcomerKind::Spot, 4 * G, 3));
    let actions = settle(&mut broker, &mut host, s(0), 0);
    let refused = |id: u64| {
        let is_it = |action: &&Action| matches!(action, Action::Refuse { vm, .. } if vm.0 == id);
        let Some(Action::Refuse { why, .. }) = actions.iter().find(is_it) else {
            panic!("{id} is not refused: {actions:?}")
        };
        why.to_string()
    };
    let words = "it asks for 9 cores, and the host has 8 cores for virtual machines";
    assert!(refused(1).starts_with(words), "{}", refused(1));
    assert_eq!(refused(1), refused(2));
    // Also by those who came before and wait.
    let words = "it asks for 3 cores, and the host's regular VMs leave 2 cores";
    assert!(refused(4).starts_with(words), "{}", refused(4));
    assert_eq!(waits(&broker, 3), Some(Waits::ForCores { missing_cores: 2 }));
}

/// A host that has fewer cores than its machines were promised says so, and nobody is evicted for
/// it.
#[test]
fn fewer_cores_than_were_promised() {
    let mut broker = broker();
    let mut host = harvested_host(3);
    assert!(!settle(&mut broker, &mut host, s(0), 0).iter().any(is_about_9));
    let ledger = CoreLedger { total: 3, minimum: 4, overdrawn: 1, ..CoreLedger::default() };
    assert_eq!(broker.ledger().cores, ledger);
    // For a regular VM it goes.
    host.waiting.push(with_cores(1, NewcomerKind::Regular, 4 * G, 1));
    assert!(settle(&mut broker, &mut host, s(1), 0).iter().any(is_about_9));
}

/// Cores that a harvest VM waits with, for memory, are nobody else's who comes later.
#[test]
fn cores_are_set_aside_with_memory_that_is_given_back() {
    let mut broker = broker();
    let mut host = harvested_host(8);
    settle(&mut broker, &mut host, s(0), 0);
    host.waiting.push(with_cores(1, NewcomerKind::Harvest, 8 * G, 3));
    host.waiting.push(with_cores(2, NewcomerKind::Harvest, 8 * G, 2));
    broker.step(&host, s(1));
    assert!(matches!(waits(&broker, 1), Some(Waits::ForMemory { .. })));
    assert_eq!(waits(&broker, 2), Some(Waits::ForCores { missing_cores: 1 }));
    assert_eq!((broker.ledger().cores.reserved, broker.ledger().cores.unallocated), (3, 1));
}
