//! Tests the extent table with requests in order, out of order and at random.

use super::*;
use proptest::prelude::*;

const LIMITS: TableLimits = TableLimits { extents: 20, spaces: 4, min_order: 1 };
const A: SpaceId = SpaceId(0xa);
const B: SpaceId = SpaceId(0xb);
const LEASE_MS: u64 = 10_000;

fn table() -> Table {
    let zones = [Zone { pages: 64, node: Some(0) }, Zone { pages: 40, node: Some(1) }];
    let mut table = Table::new(&zones, LIMITS);
    table.hello(A, Epoch(5), LEASE_MS, "a", 0).unwrap();
    table.hello(B, Epoch(1), LEASE_MS, "b", 0).unwrap();
    table
}

fn fresh(allocated: Result<Allocated, Refusal>) -> LentExtent {
    match allocated {
        Ok(Allocated::Fresh(lent)) => lent,
        other => panic!("{other:?} is no fresh extent"),
    }
}

#[test]
fn allocating_twice_gives_the_same_extent() {
    let mut table = table();
    let lent = fresh(table.allocate(A, Epoch(5), (7, 1), 3, 0));
    let again = table.allocate(A, Epoch(5), (7, 1), 3, 0);
    assert_eq!(again, Ok(Allocated::Held(lent)));
    let larger = table.allocate(A, Epoch(5), (7, 1), 4, 0);
    assert_eq!(larger, Err(Refusal::OutOfBounds));
    assert_ne!(fresh(table.allocate(B, Epoch(5), (7, 1), 3, 0)).extent, lent.extent);
}

#[test]
fn spreads_over_the_nodes_and_is_full_when_both_are() {
    let mut table = table();
    let nodes = (0..).map_while(|segment| {
        let lent = match table.allocate(A, Epoch(5), (segment, 0), 3, 0) {
            Ok(Allocated::Fresh(lent)) => lent,
            refused => {
                assert_eq!(refused, Err(Refusal::Full));
                return None;
            }
        };
        Some(u32::from(lent.first_page >= 64))
    });
    let nodes: Vec<_> = nodes.collect();
    assert_eq!(nodes.len(), 13);
    assert_eq!(nodes.iter().sum::<u32>(), 5);
    assert_eq!(table.free_pages(), 0);
}

#[test]
fn refuses_what_it_does_not_carve() {
    let mut table = table();
    for order in [0, 33, 255] {
        let refused = table.allocate(A, Epoch(5), (0, 0), order, 0);
        assert_eq!(refused, Err(Refusal::OutOfBounds), "order {order}");
    }
    assert_eq!(table.allocate(A, Epoch(5), (0, 0), 7, 0), Err(Refusal::Full));
}

#[test]
fn extents_are_bounded_in_number_leaving_ones_included() {
    let mut table = table();
    for segment in 0..20 {
        fresh(table.allocate(A, Epoch(5), (segment, 0), 1, 0));
    }
    assert_eq!(table.allocate(A, Epoch(5), (20, 0), 1, 0), Err(Refusal::Full));
    let lent = table.free(A, Epoch(5), ExtentId(1), 0).unwrap();
    assert_eq!(table.allocate(A, Epoch(5), (20, 0), 1, 0), Err(Refusal::Full));
    table.reclaimed(lent.extent);
    assert_eq!(fresh(table.allocate(A, Epoch(5), (20, 0), 1, 0)).extent, ExtentId(21));
}

#[test]
fn a_fence_shuts_out_older_epochs_and_only_those() {
    let mut table = table();
    let lent = fresh(table.allocate(A, Epoch(5), (0, 0), 1, 0));
    table.fence(A, Epoch(6), 1).unwrap();
    let stale = Refusal::StaleEpoch(Epoch(6));
    assert_eq!(table.locate(A, Epoch(5), lent.extent, 2), Err(stale));
    assert_eq!(table.allocate(A, Epoch(5), (0, 0), 1, 2), Err(stale));
    assert_eq!(table.free(A, Epoch(5), lent.extent, 2), Err(stale));
    assert_eq!(table.free_all(A, Epoch(5), 2), Err(stale));
    assert_eq!(table.fence(A, Epoch(5), 2), Err(stale));
    assert_eq!(table.renew(A, Epoch(5), 2), Err(stale));
    assert_eq!(table.hello(A, Epoch(5), LEASE_MS, "a", 2), Err(stale));
    assert!(table.list(A, Epoch(5), ExtentId(0), 9, 2).is_err());
    assert_eq!(table.locate(A, Epoch(6), lent.extent, 2), Ok(lent));
    assert_eq!(table.locate(A, Epoch(7), lent.extent, 2), Ok(lent));
    // A refused request does not extend the lease.
    assert_eq!(table.due(2 + LEASE_MS - 1), []);
    table.renew(A, Epoch(5), 2 + LEASE_MS - 1).unwrap_err();
    assert_eq!(table.due(2 + LEASE_MS), [A]);
}

#[test]
fn another_spaces_extent_is_not_there() {
    let mut table = table();
    let lent = fresh(table.allocate(A, Epoch(5), (0, 0), 1, 0));
    assert_eq!(table.locate(B, Epoch(9), lent.extent, 0), Err(Refusal::NoSuchExtent));
    assert_eq!(table.free(B, Epoch(9), lent.extent, 0), Err(Refusal::NoSuchExtent));
    assert_eq!(table.locate(SpaceId(99), Epoch(9), lent.extent, 0), Err(Refusal::NoSuchExtent));
}

#[test]
fn a_silent_space_loses_its_extents_and_then_its_name() {
    let mut table = table();
    let lent = fresh(table.allocate(A, Epoch(5), (0, 0), 1, 0));
    table.fence(A, Epoch(5), 0).unwrap();
    table.heard(A, 4_000);
    assert_eq!(table.expire(A, 4_000 + LEASE_MS - 1), []);
    assert_eq!(table.expire(A, 4_000 + LEASE_MS), [lent]);
    table.reclaimed(lent.extent);
    assert_eq!(table.free_pages(), 104);
    let late = 4_000 + LEASE_MS + FENCE_KEPT_MS;
    assert_eq!(table.forget(late), [], "both are connected");
    table.bye(A);
    table.bye(B);
    assert_eq!(table.forget(late - 1), [B]);
    assert_eq!(table.space(A).unwrap().fence, Epoch(5));
    assert_eq!(table.forget(late), [A]);
}

#[test]
fn knows_no_more_spaces_than_its_limit() {
    let mut table = table();
    table.hello(SpaceId(1), Epoch(0), 0, "", 0).unwrap();
    table.hello(SpaceId(2), Epoch(0), u64::MAX, "", 0).unwrap();
    assert_eq!(table.hello(SpaceId(3), Epoch(0), 1, "", 0), Err(Refusal::Busy));
    assert_eq!(table.space(SpaceId(1)).unwrap().lease_ms, MIN_LEASE_MS);
    assert_eq!(table.space(SpaceId(2)).unwrap().lease_ms, MAX_LEASE_MS);
    table.hello(A, Epoch(5), LEASE_MS, "a", 0).unwrap();
}

#[test]
fn who_visits_has_no_say_over_the_lease_and_who_owns_has() {
    let mut table = table();
    assert_eq!(table.visit(SpaceId(0xc), Epoch(9)), Err(Refusal::NoSuchExtent));
    table.visit(A, Epoch(5)).unwrap();
    assert_eq!(table.space(A).unwrap().lease_ms, LEASE_MS);
    table.fence(A, Epoch(5), 0).unwrap();
    assert_eq!(table.visit(A, Epoch(4)), Err(Refusal::StaleEpoch(Epoch(5))));
    let owner = NodeDigest::of("a");
    table.own(A, owner, 0);
    let record = table.space(A).unwrap();
    assert_eq!((record.owner, record.lease_ms), (Some(owner), MIN_LEASE_MS));
}

#[test]
fn contradicting_records_are_refused() {
    let zones = [Zone { pages: 64, node: None }];
    let record = SpaceRecord {
        space: A,
        fence: Epoch(3),
        lease_ms: LEASE_MS,
        consumer: "a".into(),
        owner: None,
    };
    let lent = |extent, segment, first_page, space| LentExtent {
        extent: ExtentId(extent),
        space,
        segment,
        member: 0,
        order: 2,
        first_page,
    };
    let restore = |extents: &[LentExtent]| {
        let extents = extents.iter().copied();
        Table::restore(&zones, LIMITS, ExtentId(9), [record.clone()], extents, 0)
    };
    let table = restore(&[lent(1, 0, 0, A), lent(2, 1, 60, A)]).unwrap();
    table.assert_consistent();
    assert_eq!(table.free_pages(), 56);
    assert_eq!(table.space(A), Some(record.clone()));
    for (extents, error) in [
        (vec![lent(1, 0, 0, B)], RestoreError::UnknownSpace(ExtentId(1), B)),
        (vec![lent(1, 0, 0, A), lent(2, 1, 0, A)], RestoreError::Overlap(ExtentId(2))),
        (vec![lent(1, 0, 64, A)], RestoreError::Overlap(ExtentId(1))),
        (vec![lent(1, 0, 2, A)], RestoreError::Overlap(ExtentId(1))),
        (vec![lent(1, 0, 0, A), lent(1, 1, 4, A)], RestoreError::Impossible(ExtentId(1))),
        (vec![lent(1, 0, 0, A), lent(2, 0, 4, A)], RestoreError::Impossible(ExtentId(2))),
        (vec![lent(9, 0, 0, A)], RestoreError::Impossible(ExtentId(9))),
    ] {
        assert_eq!(restore(&extents).unwrap_err(), error);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Hello(u64, u64),
    Bye(u64),
    Allocate(u64, u64, u64, u8),
    Free(u64, u64, u64),
    FreeAll(u64, u64),
    Fence(u64, u64),
    Renew(u64, u64),
    Expire(u64),
    Limit(u64),
    Reclaim,
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let (space, epoch) = (0u64..6, 1u64..5);
    prop_oneof![
        2 => (space.clone(), epoch.clone()).prop_map(|(s, e)| Step::Hello(s, e)),
        1 => space.clone().prop_map(Step::Bye),
        8 => (space.clone(), epoch.clone(), 0u64..6, 0u8..6)
            .prop_map(|(s, e, segment, order)| Step::Allocate(s, e, segment, order)),
        3 => (space.clone(), epoch.clone(), 0u64..40).prop_map(|(s, e, x)| Step::Free(s, e, x)),
        1 => (space.clone(), epoch.clone()).prop_map(|(s, e)| Step::FreeAll(s, e)),
        1 => (space.clone(), epoch.clone()).prop_map(|(s, e)| Step::Fence(s, e)),
        1 => (space, epoch).prop_map(|(s, e)| Step::Renew(s, e)),
        2 => (0u64..LEASE_MS).prop_map(Step::Expire),
        1 => (0u64..100).prop_map(Step::Limit),
        3 => Just(Step::Reclaim),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    /// Any requests keep the invariants, and an epoch below the fence changes nothing. A table
    /// restored from its records equals the original.
    #[test]
    fn any_requests_keep_it_consistent(steps in prop::collection::vec(step(), 0..150)) {
        let zones = [Zone { pages: 64, node: None }, Zone { pages: 23, node: None }];
        let mut table = Table::new(&zones, LIMITS);
        let mut connections: BTreeMap<u64, u32> = BTreeMap::new();
        let mut leaving = Vec::new();
        let mut now_ms = 0;
        for step in steps {
            let fence =
                |table: &Table, space| table.space(SpaceId(space)).map(|known| known.fence);
            match step {
                Step::Hello(s, e) => {
                    let fenced = fence(&table, s).is_some_and(|fence| fence > Epoch(e));
                    let welcome = table.hello(SpaceId(s), Epoch(e), LEASE_MS, "c", now_ms);
                    if welcome.is_ok() {
                        *connections.entry(s).or_default() += 1;
                    }
                    prop_assert!(!(fenced && welcome.is_ok()));
                }
                Step::Bye(s) => {
                    if let Some(count) = connections.get_mut(&s).filter(|count| **count > 0) {
                        *count -= 1;
                        table.bye(SpaceId(s));
                    }
                }
                Step::Allocate(s, e, segment, order) => {
                    let before = fence(&table, s);
                    let done = table.allocate(SpaceId(s), Epoch(e), (segment, 0), order, now_ms);
                    prop_assert!(done.is_err() || before.unwrap() <= Epoch(e));
                    if let Ok(Allocated::Fresh(_)) = done {
                        prop_assert_eq!(table.excess_pages(), 0);
                    }
                }
                Step::Free(s, e, x) => {
                    let before = fence(&table, s);
                    let done = table.free(SpaceId(s), Epoch(e), ExtentId(x), now_ms);
                    prop_assert!(done.is_err() || before.unwrap() <= Epoch(e));
                    leaving.extend(done);
                }
                Step::FreeAll(s, e) => {
                    let done = table.free_all(SpaceId(s), Epoch(e), now_ms);
                    leaving.extend(done.into_iter().flatten());
                }
                Step::Fence(s, e) => {
                    let before = fence(&table, s);
                    let done = table.fence(SpaceId(s), Epoch(e), now_ms);
                    prop_assert!(fence(&table, s) >= before);
                    prop_assert!(done.is_err() || fence(&table, s) == Some(Epoch(e)));
                }
                Step::Renew(s, e) => {
                    let _ = table.renew(SpaceId(s), Epoch(e), now_ms);
                }
                Step::Expire(after_ms) => {
                    now_ms += after_ms;
                    for space in table.due(now_ms) {
                        let taken = table.expire(space, now_ms);
                        prop_assert!(!taken.is_empty());
                        leaving.extend(taken);
                    }
                    for space in table.forget(now_ms) {
                        prop_assert_eq!(connections.get(&space.0).copied().unwrap_or(0), 0);
                    }
                }
                Step::Limit(pages) => table.set_limit(pages, now_ms),
                Step::Reclaim => {
                    if let Some(lent) = leaving.pop() {
                        table.reclaimed(lent.extent);
                    }
                }
                Step::Restart => {
                    let spaces: Vec<_> = table.spaces().map(|space| space.record).collect();
                    let extents: Vec<_> = table.extents().copied().collect();
                    let next = table.next_extent();
                    table = Table::restore(
                        &zones, LIMITS, next, spaces.clone(), extents.clone(), now_ms,
                    ).unwrap();
                    let again: Vec<_> = table.spaces().map(|space| space.record).collect();
                    prop_assert_eq!(spaces, again);
                    prop_assert!(extents.iter().eq(table.extents()));
                    leaving.clear();
                    connections.clear();
                }
            }
            table.assert_consistent();
            prop_assert_eq!(
                table.leaving_pages(),
                leaving.iter().map(|lent| 1u64 << lent.order).sum::<u64>()
            );
        }
    }
}
