//! Tests over real sockets which requests a donor serves and refuses.

use crate::common::*;
use hecaton_donor::{Donor, DonorConfig, DonorError, StopHandle, listen, prometheus_text, run};
use hecaton_memory::{Epoch, ExtentId, Generation, PAGE_SIZE, Size, page_sum};
use hecaton_testkit::wait_until;
use hecaton_transport::client::{Connection, ConnectionError, Options, Outcome};
use hecaton_transport::protocol::{HeldExtent, MAX_HELD, MAX_PAGES, Refusal, Request};
use std::sync::mpsc;
use std::time::{Duration, Instant};

#[test]
fn pages_come_back_as_written_to_many_borrowers_at_once() {
    let (donor, serving) = start(1 << 14);
    let address = serving.address();
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            scope.spawn(move || {
                // Two connections for each space, as two threads of one borrower have them.
                let mut borrower = Borrower::connect(address, thread / 2, 1);
                let extents = [0, 1].map(|at| borrower.allocate(thread * 2 + at, 9));
                for round in 0..10 {
                    let number = |at: usize, page: u32| {
                        u64::from(page) + (at as u64) * 1000 + thread * 10_000 + round * 100_000
                    };
                    for (at, &extent) in extents.iter().enumerate() {
                        let pages: Vec<u32> = (0..MAX_PAGES as u32).map(|i| i * 2 % 511).collect();
                        let data: Vec<_> = pages.iter().map(|&p| page(number(at, p))).collect();
                        assert_eq!(borrower.write(extent, &pages, &data), Outcome::Done);
                        assert_eq!(borrower.pages(extent, &pages), data);
                    }
                    let first = borrower.pages(extents[0], &[0, 510, 2]);
                    assert_eq!(first, [0, 510, 2].map(|p| page(number(0, p))));
                }
            });
        }
    });
    let snapshot = donor.snapshot();
    assert_eq!(snapshot.counters.pages_written, 8 * 10 * 2 * MAX_PAGES as u64);
    assert_eq!(snapshot.lent_pages, 16 << 9);
    assert_eq!(snapshot.spaces.len(), 4);
    assert_eq!(snapshot.counters.write.count, 160);
}

#[test]
fn pages_never_written_are_zeros_and_take_no_memory() {
    let (donor, serving) = start(4096);
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let extent = borrower.allocate(0, 12);
    let all: Vec<u32> = (0..256).collect();
    assert!(borrower.pages(extent, &all).iter().all(|page| *page == [0; PAGE_SIZE]));
    assert_eq!(donor.snapshot().committed_bytes, 0);
    // The donor counts after it sends the answer, so the borrower may have the pages earlier.
    wait_until("the pages read are counted", || donor.snapshot().counters.zero_pages_read >= 256);
    assert_eq!(donor.snapshot().counters.zero_pages_read, 256);
    borrower.write(extent, &[7], &[page(7)]);
    assert_eq!(borrower.pages(extent, &[6, 7, 7, 8]), {
        let zeros = [0; PAGE_SIZE];
        [zeros, page(7), page(7), zeros]
    });
    assert_eq!(donor.snapshot().committed_bytes, PAGE_SIZE as u64);
}

#[test]
fn a_full_donor_refuses_and_says_so_in_its_load() {
    let (donor, serving) = start(1024 + 512);
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    assert_eq!(borrower.welcome().load.free_pages, 1536);
    let large = borrower.allocate(0, 10);
    assert_eq!(
        borrower.refused(Request::Allocate {
            segment: 1,
            member: 0,
            order: 10,
            generation: Generation(1)
        }),
        Refusal::Full
    );
    assert_eq!(borrower.load().free_pages, 512);
    borrower.allocate(1, 9);
    assert_eq!(
        borrower.refused(Request::Allocate {
            segment: 2,
            member: 0,
            order: 0,
            generation: Generation(1)
        }),
        Refusal::Full
    );
    assert_eq!(borrower.load().free_pages, 0);
    assert_eq!(borrower.allocate(0, 10), large, "what is held is not refused");
    borrower.done(Request::Free { extent: large });
    assert_eq!(borrower.load().free_pages, 1024);
    assert_ne!(borrower.allocate(2, 10), large, "an id is never used again");
    assert_eq!(donor.snapshot().counters.refusals.full, 2);
}

#[test]
fn a_corrupt_write_is_refused_and_leaves_no_trace() {
    let (donor, serving) = start(64);
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let extent = borrower.allocate(0, 4);
    borrower.write(extent, &[0, 1], &[page(0), page(1)]);
    let data = [page(10), page(11), page(12)];
    let mut sums = data.map(|page| page_sum(&page));
    sums[1] ^= 1;
    let refused = borrower.write_with(extent, &[0, 1, 2], &sums, &data);
    assert_eq!(refused, Outcome::Refused(Refusal::Corrupt(1)));
    assert_eq!(borrower.pages(extent, &[0, 1, 2]), [page(0), page(1), [0; PAGE_SIZE]]);
    assert_eq!(donor.snapshot().counters.refusals.corrupt, 1);
}

#[test]
fn a_stale_epoch_is_refused_for_everything_old_connections_too() {
    let (_donor, serving) = start(64);
    let mut old = Borrower::connect(serving.address(), 1, 1);
    let extent = old.allocate(0, 4);
    old.write(extent, &[0], &[page(1)]);
    let mut new = Borrower::connect(serving.address(), 1, 2);
    old.write(extent, &[1], &[page(2)]);
    new.done(Request::Fence);
    let stale = Refusal::StaleEpoch(Epoch(2));
    assert_eq!(old.write(extent, &[0], &[page(3)]), Outcome::Refused(stale));
    for request in [
        Request::Read { extent, pages: &[0] },
        Request::Discard { extent, generation: Generation(1), first: 0, count: 1 },
        Request::Allocate { segment: 0, member: 0, order: 4, generation: Generation(1) },
        Request::Free { extent },
        Request::FreeAll,
        Request::List { from: ExtentId(0) },
        Request::Fence,
        Request::Renew,
    ] {
        assert_eq!(old.refused(request), stale, "{request:?}");
    }
    assert_eq!(new.pages(extent, &[0, 1]), [page(1), page(2)]);
    let hello = hello(1, 1, LONG_LEASE);
    match Connection::open(serving.address(), &hello, &Options::default()) {
        Err(ConnectionError::Refused(refusal)) => assert_eq!(refusal, stale),
        other => panic!("a stale borrower was answered with {:?}", other.map(drop)),
    }
}

#[test]
fn another_spaces_extent_is_out_of_reach() {
    let (_donor, serving) = start(64);
    let mut owner = Borrower::connect(serving.address(), 1, 1);
    let mut other = Borrower::connect(serving.address(), 2, 9);
    let extent = owner.allocate(0, 4);
    owner.write(extent, &[0], &[page(1)]);
    for request in [
        Request::Read { extent, pages: &[0] },
        Request::Discard { extent, generation: Generation(1), first: 0, count: 1 },
        Request::Free { extent },
    ] {
        assert_eq!(other.refused(request), Refusal::NoSuchExtent, "{request:?}");
    }
    let refused = other.write(extent, &[0], &[page(2)]);
    assert_eq!(refused, Outcome::Refused(Refusal::NoSuchExtent));
    other.done(Request::FreeAll);
    assert_eq!(owner.pages(extent, &[0]), [page(1)]);
}

#[test]
fn what_is_out_of_bounds_is_refused() {
    let (_donor, serving) = start(64);
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let extent = borrower.allocate(0, 4);
    borrower.write(extent, &[15], &[page(1)]);
    let refused = borrower.write(extent, &[15, 16], &[page(2), page(3)]);
    assert_eq!(refused, Outcome::Refused(Refusal::OutOfBounds));
    assert_eq!(borrower.pages(extent, &[15]), [page(1)], "all pages are written or none");
    for request in [
        Request::Read { extent, pages: &[0, u32::MAX] },
        Request::Discard { extent, generation: Generation(1), first: 15, count: 2 },
        Request::Allocate { segment: 0, member: 0, order: 5, generation: Generation(1) },
        Request::Allocate { segment: 1, member: 0, order: 33, generation: Generation(1) },
    ] {
        assert_eq!(borrower.refused(request), Refusal::OutOfBounds, "{request:?}");
    }
}

#[test]
fn memory_is_the_hosts_again_after_discard_and_free() {
    let (donor, serving) = start(8192);
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let extents = [0, 1].map(|segment| borrower.allocate(segment, 12));
    for extent in extents {
        for first in (0..4096).step_by(MAX_PAGES) {
            let pages: Vec<u32> = (first..first + MAX_PAGES as u32).collect();
            let data: Vec<_> = pages.iter().map(|&number| page(number.into())).collect();
            assert_eq!(borrower.write(extent, &pages, &data), Outcome::Done);
        }
    }
    let mib = |donor: &Donor| donor.snapshot().committed_bytes >> 20;
    assert_eq!(mib(&donor), 32);
    borrower.done(Request::Discard {
        extent: extents[0],
        generation: Generation(1),
        first: 100,
        count: 2048,
    });
    assert_eq!(mib(&donor), 24);
    assert_eq!(borrower.pages(extents[0], &[99, 100, 2147, 2148]), {
        let zeros = [0; PAGE_SIZE];
        [page(99), zeros, zeros, page(2148)]
    });
    borrower.done(Request::Free { extent: extents[1] });
    assert_eq!(mib(&donor), 8);
    borrower.done(Request::FreeAll);
    borrower.done(Request::Renew);
    let snapshot = donor.snapshot();
    assert_eq!((snapshot.committed_bytes, snapshot.free_pages), (0, 8192));
    assert_eq!(snapshot.counters.extents_freed, 2);
    let again = borrower.allocate(0, 12);
    assert_eq!(
        borrower.pages(again, &[0]),
        [[0; PAGE_SIZE]],
        "nothing is left of the owner before"
    );
}

#[test]
fn a_borrower_that_falls_silent_loses_its_extents() {
    let (donor, serving) = start(64);
    let address = serving.address();
    let mut silent = Borrower::with_lease(address, 1, 1, Duration::from_secs(1));
    let mut kept = Borrower::with_lease(address, 2, 1, Duration::from_secs(30));
    let lost = silent.allocate(0, 4);
    let extent = kept.allocate(0, 4);
    silent.write(lost, &[0], &[page(1)]);
    kept.write(extent, &[0], &[page(2)]);
    wait_until("the lease runs out", || donor.snapshot().counters.extents_expired == 1);
    wait_until("the memory is free", || donor.snapshot().free_pages == 48);
    assert_eq!(silent.refused(Request::Read { extent: lost, pages: &[0] }), Refusal::NoSuchExtent);
    assert_eq!(kept.pages(extent, &[0]), [page(2)]);
    assert_eq!(donor.snapshot().committed_bytes, PAGE_SIZE as u64);
    assert_ne!(silent.allocate(0, 4), lost, "it may borrow again");
}

#[test]
fn reading_keeps_a_lease() {
    let (donor, serving) = start(64);
    let mut borrower = Borrower::with_lease(serving.address(), 1, 1, LONG_LEASE);
    let extent = borrower.allocate(0, 0);
    let silent = || Duration::from_millis(donor.snapshot().spaces[0].silent_ms);
    wait_until("the borrower is silent for a second", || silent() >= Duration::from_secs(1));
    let before = Instant::now();
    borrower.pages(extent, &[0]);
    // The donor tells it give or take a tenth of a second.
    let (silent, most) = (silent(), before.elapsed() + Duration::from_millis(300));
    assert!(silent <= most, "silent for {silent:?}, and not for {most:?} at most");
}

#[test]
fn a_lost_map_is_told_in_several_answers() {
    let (_donor, serving) = start(8192);
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let count = MAX_HELD as u64 + 5;
    for segment in 0..count {
        let extent = borrower.allocate(segment, 1);
        if segment == 3 {
            borrower.write(extent, &[1], &[page(1)]);
        }
    }
    let mut from = ExtentId(0);
    let mut lines: Vec<HeldExtent> = Vec::new();
    loop {
        let Outcome::Held(more) = borrower.call(Request::List { from }) else { panic!("no list") };
        let Some(last) = more.last() else { break };
        from = ExtentId(last.extent.0 + 1);
        lines.extend(more);
    }
    let segments: Vec<_> = lines.iter().map(|line| line.segment).collect();
    assert_eq!(segments, (0..count).collect::<Vec<_>>());
    assert!(lines.iter().all(|line| (line.member, line.order) == (0, 1)));
    assert!(lines.iter().all(|line| line.written == u32::from(line.segment == 3)));
}

#[test]
fn runs_until_told_to_stop() {
    let stop = StopHandle::default();
    let (send, receive) = mpsc::channel();
    let running = std::thread::spawn({
        let stop = stop.clone();
        move || run(&config(64), &stop, |address| send.send(address).unwrap())
    });
    let address = receive.recv().unwrap();
    let mut borrower = Borrower::connect(address, 1, 1);
    borrower.allocate(0, 0);
    stop.stop();
    running.join().unwrap().unwrap();
    assert!(borrower.0.call(Request::Renew, &[]).is_err());
}

#[test]
fn refuses_what_cannot_be_lent_with_the_value_and_the_way_out() {
    let stop = StopHandle::default();
    let refusal = |config: &DonorConfig| run(config, &stop, |_| ()).unwrap_err();

    let error = refusal(&DonorConfig { lend: Size(1 << 50), ..config(1) });
    assert!(matches!(error, DonorError::TooMuch { .. }));
    assert!(error.to_string().starts_with("1024T cannot be lent: this machine has"), "{error}");

    let error = refusal(&DonorConfig { lend: Size(100), ..config(1) });
    assert_eq!(error.to_string(), "100 is too little to lend: the least is 4K");

    let error = refusal(&DonorConfig { name: "n".repeat(65), ..config(1) });
    assert!(matches!(error, DonorError::Name(_)));

    let error = refusal(&DonorConfig { numa_node: Some(999), ..config(1) });
    assert!(error.to_string().contains("no memory on NUMA node 999"), "{error}");

    let taken = listen(config(1).listen).unwrap();
    let address = taken.local_addr().unwrap();
    let error = refusal(&DonorConfig { listen: address, ..config(1) });
    assert!(error.to_string().starts_with(&format!("{address} is in use")), "{error}");
}

#[test]
fn metrics_name_their_donor() {
    let (donor, serving) = start(64);
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let extent = borrower.allocate(0, 2);
    borrower.write(extent, &[0, 1], &[page(0), page(1)]);
    borrower.refused(Request::Free { extent: ExtentId(99) });
    let snapshot = donor.snapshot();
    let json = serde_json::to_string(&snapshot).unwrap();
    assert_eq!(serde_json::from_str::<hecaton_donor::Snapshot>(&json).unwrap(), snapshot);
    let text = prometheus_text(vec![snapshot]);
    for line in [
        "hecaton_donor_memory_bytes{donor=\"d1\"} 262144",
        "hecaton_donor_lent_bytes{donor=\"d1\"} 16384",
        "hecaton_donor_pages_written_total{donor=\"d1\"} 2",
        "hecaton_donor_refusals_total{donor=\"d1\",reason=\"no_such_extent\"} 1",
        "hecaton_donor_service_seconds_count{donor=\"d1\",request=\"write\"} 1",
        "hecaton_donor_service_seconds_bucket{le=\"+Inf\",donor=\"d1\",request=\"write\"} 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert!(text.ends_with("# EOF\n"));
}
