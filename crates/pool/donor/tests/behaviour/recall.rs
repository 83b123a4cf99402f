//! A donor that lends less than it has lent asks for what is above its limit, and serves it
//! meanwhile.

use crate::common::*;
use hecaton_donor::{Donor, DonorConfig, listen};
use hecaton_memory::{PAGE_SIZE, Size};
use hecaton_testkit::wait_until;
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::{Refusal, Request};

const ORDER: u8 = 6;
const EXTENT_PAGES: u64 = 1 << ORDER;

fn extents(count: u64) -> Option<Size> {
    Some(Size(count * EXTENT_PAGES * PAGE_SIZE as u64))
}

fn recalled(borrower: &mut Borrower) -> u32 {
    borrower.done(Request::Renew);
    borrower.load().recalled
}

#[test]
fn each_borrower_is_told_how_much_of_its_own_is_wanted_back() {
    let (donor, serving) = start(16 * EXTENT_PAGES);
    let mut many = Borrower::connect(serving.address(), 1, 1);
    let mut few = Borrower::connect(serving.address(), 2, 1);
    let of_many: Vec<_> = (0..9).map(|segment| many.allocate(segment, ORDER)).collect();
    (0..3).for_each(|segment| _ = few.allocate(segment, ORDER));
    assert_eq!((recalled(&mut many), many.load().free_pages), (0, 4 * EXTENT_PAGES));
    donor.set_limit(extents(8));
    assert_eq!((recalled(&mut many), recalled(&mut few)), (3, 1));
    assert_eq!(many.load().free_pages, 0);
    let request = Request::Allocate {
        segment: 9,
        member: 0,
        order: ORDER,
        generation: hecaton_memory::Generation(1),
    };
    assert_eq!(many.refused(request), Refusal::Full);
    assert_eq!(many.write(of_many[0], &[3], &[page(7)]), Outcome::Done, "what is lent is served");
    for extent in &of_many[1..5] {
        many.done(Request::Free { extent: *extent });
    }
    assert_eq!((recalled(&mut many), recalled(&mut few)), (0, 0));
    assert_eq!(many.pages(of_many[0], &[3]), [page(7)]);
    donor.set_limit(None);
    assert_eq!(donor.snapshot().limit_pages, 16 * EXTENT_PAGES);
    many.allocate(9, ORDER);
}

#[test]
fn a_successor_wants_back_what_it_is_told_to() {
    let (donor, serving) = start(16 * EXTENT_PAGES);
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    (0..5).for_each(|segment| _ = borrower.allocate(segment, ORDER));
    let fds = donor.fds().unwrap();
    serving.stop();
    drop(donor);
    let config = config(16 * EXTENT_PAGES);
    let donor = Donor::open(&config, Some(fds)).unwrap();
    donor.set_limit(extents(2));
    let serving = donor.serve(listen(config.listen).unwrap()).unwrap();
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    assert_eq!(borrower.welcome().load.recalled, 3, "said with the welcome");
    assert_eq!(recalled(&mut borrower), 3);
    let snapshot = donor.snapshot();
    assert_eq!(snapshot.recalled_pages, 3 * EXTENT_PAGES);
    assert_eq!(snapshot.told_limit_bytes, extents(2).map(|limit| limit.0));
    assert_eq!(snapshot.spaces[0].recalled, 3);
}

#[test]
fn a_host_that_is_short_of_memory_gets_some_back() {
    const KEEP_FREE: u64 = 1 << 30;
    let scratch = tempfile::tempdir().unwrap();
    let meminfo = scratch.path().join("meminfo");
    let extent_bytes = EXTENT_PAGES * PAGE_SIZE as u64;
    let host_has = |bytes: u64| {
        // As a whole, so that the donor never reads half of it.
        let next = scratch.path().join("next");
        std::fs::write(&next, format!("MemAvailable: {} kB\n", bytes / 1024)).unwrap();
        std::fs::rename(&next, &meminfo).unwrap();
    };
    host_has(2 * KEEP_FREE);
    let config = DonorConfig {
        keep_free: Some(Size(KEEP_FREE)),
        meminfo: meminfo.clone(),
        ..config(16 * EXTENT_PAGES)
    };
    let donor = Donor::open(&config, None).unwrap();
    let serving = donor.serve(listen(config.listen).unwrap()).unwrap();
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let held: Vec<_> = (0..8).map(|segment| borrower.allocate(segment, ORDER)).collect();
    assert_eq!(recalled(&mut borrower), 0);

    host_has(KEEP_FREE - 3 * extent_bytes + 4096);
    wait_until("asked for three", || recalled(&mut borrower) == 3);
    // The host has what it needs by then, or it would be asked for more.
    host_has(KEEP_FREE + 4096);
    held[..3].iter().for_each(|extent| borrower.done(Request::Free { extent: *extent }));
    assert_eq!((recalled(&mut borrower), borrower.load().free_pages), (0, 1));
    // The lower of two limits counts: the told one, or the one that leaves the host enough.
    donor.set_limit(extents(4));
    assert_eq!(recalled(&mut borrower), 1);
    donor.set_limit(extents(15));
    assert_eq!(recalled(&mut borrower), 0);
    assert_eq!(donor.snapshot().limit_pages, 5 * EXTENT_PAGES + 1);

    // A successor on a host with just enough lends no more than there is.
    let fds = donor.fds().unwrap();
    serving.stop();
    drop(donor);
    let donor = Donor::open(&config, Some(fds)).unwrap();
    let _serving = donor.serve(listen(config.listen).unwrap()).unwrap();
    assert_eq!(donor.snapshot().host_limit_bytes, Some(5 * extent_bytes));
    // A donor that cannot read the host's memory lends as before.
    std::fs::remove_file(&meminfo).unwrap();
    let donor = Donor::open(&config, None).unwrap();
    let _serving = donor.serve(listen(config.listen).unwrap()).unwrap();
    assert_eq!(donor.snapshot().limit_pages, 16 * EXTENT_PAGES);
}
