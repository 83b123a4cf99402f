use super::*;
use hecaton_memory::{Epoch, ExtentId};

const DONOR: DonorIndex = DonorIndex(0);
const PLACE: Place = Place { donor: DONOR, boot: 7, extent: ExtentId(1) };

fn at(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn flights() -> Flights {
    Flights::new(Limits { patience: at(1000), stall: at(300) })
}

fn read(flights: &mut Flights, token: u64, pages: &[u32], now: Duration) {
    flights.read(token, 0, PLACE, pages.iter().copied(), now);
}

fn open(flights: &mut Flights, now: Duration) {
    assert!(flights.begin_connect(DONOR, now));
    flights.opened(DONOR, PLACE.boot);
}

/// Sends what is to be sent; the slots.
fn send_all(flights: &mut Flights, now: Duration) -> Vec<Slot> {
    let mut slots = Vec::new();
    while let Some(next) = flights.next_to_send(DONOR) {
        slots.push(next.slot);
        flights.sent(DONOR, now);
    }
    slots
}

fn failures(flights: &mut Flights) -> Vec<(u64, usize, Cause)> {
    std::iter::from_fn(|| flights.next_failure())
        .map(|failure| (failure.token, failure.from, failure.cause))
        .collect()
}

#[test]
fn a_read_waits_for_its_connection_and_is_sent_in_turn() {
    let mut flights = flights();
    read(&mut flights, 10, &[1, 2], at(0));
    read(&mut flights, 11, &[3], at(0));
    assert_eq!(flights.next_to_send(DONOR), None);
    assert_eq!(flights.to_connect(at(0)), [DONOR]);
    assert!(flights.to_connect(at(0)).is_empty(), "one attempt at a time");
    flights.opened(DONOR, PLACE.boot);
    let next = flights.next_to_send(DONOR).expect("the first read");
    assert_eq!((next.place, next.pages), (PLACE, &[1, 2][..]));
    let slots = send_all(&mut flights, at(1));
    assert_eq!(flights.pages(slots[0], 0, 1, at(2)), Some((10, 0)));
    assert_eq!(flights.pages(slots[0], 1, 1, at(2)), Some((10, 1)));
    assert_eq!(flights.pages(slots[1], 0, 1, at(2)), Some((11, 0)));
    assert!(flights.is_empty());
}

#[test]
fn a_cut_read_goes_on_where_it_was_and_before_later_ones() {
    let mut flights = flights();
    read(&mut flights, 10, &[1, 2, 3], at(0));
    read(&mut flights, 11, &[4], at(0));
    open(&mut flights, at(0));
    let slots = send_all(&mut flights, at(0));
    flights.pages(slots[0], 0, 2, at(1));
    flights.broke(DONOR, at(2));
    read(&mut flights, 12, &[5], at(2));
    assert_eq!(flights.to_connect(at(2)), [DONOR], "no pause after a connection that worked");
    flights.opened(DONOR, PLACE.boot);
    assert_eq!(flights.next_to_send(DONOR).expect("the cut read").pages, [3]);
    let slots = send_all(&mut flights, at(3));
    assert_eq!(flights.pages(slots[0], 0, 1, at(4)), Some((10, 2)));
    assert_eq!(flights.pages(slots[1], 0, 1, at(4)), Some((11, 0)));
    assert_eq!(flights.pages(slots[2], 0, 1, at(4)), Some((12, 0)));
    assert_eq!(failures(&mut flights), []);
}

#[test]
fn a_cut_write_fails_when_it_can_no_longer_land() {
    let mut flights = flights();
    open(&mut flights, at(0));
    flights.write(20, 0, PLACE, 1, at(0));
    flights.broke(DONOR, at(1));
    assert_eq!(failures(&mut flights), [], "the donor may still be storing it");
    assert_eq!(flights.to_connect(at(1)), [DONOR]);
    flights.opened(DONOR, PLACE.boot);
    assert_eq!(failures(&mut flights), [(20, 0, Cause::Interrupted)]);
    assert!(flights.is_empty());
}

#[test]
fn another_life_of_the_donor_is_a_loss() {
    let mut flights = flights();
    open(&mut flights, at(0));
    read(&mut flights, 10, &[1, 2], at(0));
    let slots = send_all(&mut flights, at(0));
    flights.pages(slots[0], 0, 1, at(0));
    flights.write(20, 0, PLACE, 1, at(0));
    flights.broke(DONOR, at(1));
    flights.to_connect(at(1));
    flights.opened(DONOR, PLACE.boot + 1);
    assert_eq!(flights.next_to_send(DONOR), None);
    assert_eq!(failures(&mut flights), [(20, 0, Cause::Lost), (10, 1, Cause::Lost)]);
}

#[test]
fn a_connection_to_an_earlier_life_is_given_up_and_loses_nothing() {
    let mut flights = flights();
    open(&mut flights, at(0));
    // The donor has restarted since, and given an extent over another connection.
    let place = Place { boot: PLACE.boot + 1, ..PLACE };
    flights.read(10, 0, place, [1].into_iter(), at(5));
    assert_eq!(flights.link_for(place, at(5)), Link::Stale);
    assert_eq!(flights.next_to_send(DONOR), None);
    assert!(flights.is_stale(DONOR));
    assert_eq!(failures(&mut flights), []);
    flights.broke(DONOR, at(5));
    assert_eq!(flights.to_connect(at(5)), [DONOR]);
    flights.opened(DONOR, place.boot);
    assert!(!flights.is_stale(DONOR));
    assert_eq!(send_all(&mut flights, at(6)).len(), 1);
}

#[test]
fn attempts_pause_longer_and_longer_until_patience_ends() {
    let mut flights = flights();
    read(&mut flights, 10, &[1], at(0));
    let mut attempts = Vec::new();
    for ms in 0..2000 {
        if !flights.to_connect(at(ms)).is_empty() {
            attempts.push(ms);
            flights.broke(DONOR, at(ms));
        }
        assert!(flights.tick(at(ms)).is_empty());
    }
    assert_eq!(attempts, [0, 20, 60, 140, 300, 620]);
    assert_eq!(failures(&mut flights), [(10, 0, Cause::Unreachable)]);
    assert_eq!(flights.next_attempt(), None);
}

#[test]
fn a_failure_long_ago_says_nothing_of_the_next_attempt() {
    let (mut flights, failover) = (flights(), at(150));
    let is_down = |flights: &Flights, now| flights.is_down(DONOR, now, failover);
    open(&mut flights, at(0));
    flights.broke(DONOR, at(10));
    assert!(flights.begin_connect(DONOR, at(900)));
    assert!(is_down(&flights, at(900)), "a moment ago");
    flights.broke(DONOR, at(901));
    assert!(is_down(&flights, at(2000)), "nobody has tried");
    assert!(flights.begin_connect(DONOR, at(2000)));
    assert!(!is_down(&flights, at(2000)), "it has some time to answer");
    assert!(is_down(&flights, at(2150)));
}

#[test]
fn a_donor_that_does_not_answer_or_welcome_is_given_up() {
    let mut flights = flights();
    open(&mut flights, at(0));
    read(&mut flights, 10, &[1, 2], at(0));
    let slots = send_all(&mut flights, at(0));
    assert!(flights.tick(at(299)).is_empty());
    flights.pages(slots[0], 0, 1, at(299));
    assert!(flights.tick(at(400)).is_empty(), "it makes progress");
    assert_eq!(flights.tick(at(600)), [DONOR]);
    flights.broke(DONOR, at(600));
    assert_eq!(flights.to_connect(at(600)), [DONOR]);
    assert!(flights.tick(at(899)).is_empty());
    assert_eq!(flights.tick(at(900)), [DONOR]);
}

#[test]
fn a_connection_that_nothing_waits_for_is_watched_too() {
    let mut flights = flights();
    assert!(!flights.needs_clock());
    assert!(flights.begin_connect(DONOR, at(0)));
    assert!(flights.is_empty() && flights.needs_clock());
    assert_eq!(flights.tick(at(300)), [DONOR]);
    flights.broke(DONOR, at(300));
    assert!(!flights.needs_clock());
}

#[test]
fn refusals_are_told_apart() {
    let mut flights = flights();
    open(&mut flights, at(0));
    for (token, refusal, cause) in [
        (1, Refusal::NoSuchExtent, Cause::Lost),
        (2, Refusal::StaleEpoch(Epoch(9)), Cause::Fenced),
        (3, Refusal::Corrupt(0), Cause::Interrupted),
        (4, Refusal::OutOfBounds, Cause::Refused(Refusal::OutOfBounds)),
    ] {
        let slot = flights.write(token, 0, PLACE, 1, at(0));
        flights.refused(slot, refusal);
        assert_eq!(failures(&mut flights), [(token, 0, cause)]);
    }
    read(&mut flights, 5, &[1], at(0));
    flights.fenced();
    assert_eq!(failures(&mut flights), [(5, 0, Cause::Fenced)]);
    assert!(flights.is_empty());
}

#[test]
fn room_is_bounded_and_comes_back() {
    let mut flights = flights();
    assert!(flights.has_room(MAX_PAGES_UNDER_WAY));
    assert!(!flights.has_room(MAX_PAGES_UNDER_WAY + 1));
    open(&mut flights, at(0));
    for token in 0..MAX_REQUESTS as u64 {
        assert!(flights.has_room(1));
        read(&mut flights, token, &[1], at(0));
    }
    assert!(!flights.has_room(1));
    for slot in send_all(&mut flights, at(0)) {
        flights.pages(slot, 0, 1, at(0));
    }
    assert!(flights.has_room(MAX_PAGES_UNDER_WAY));
}
