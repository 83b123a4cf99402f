//! Whatever is encoded comes back, and whatever comes is decoded or refused, never worse.

use hecaton_memory::{Epoch, ExtentId, Generation, SpaceId};
use hecaton_transport::codec::{
    AnswerTables, HEAD_BYTES, HELLO_BYTES, Head, MAX_FRAME_BYTES, RequestTables, WELCOME_BYTES,
    decode_answer, decode_hello, decode_request, decode_welcome, encode_answer, encode_hello,
    encode_request, encode_welcome, seal_greeting,
};
use hecaton_transport::protocol::{
    Answer, FillSource, HeldExtent, Hello, Load, MAX_FILL, MAX_HELD, MAX_NAME, MAX_PAGES,
    MAX_VERIFY, PageState, Refusal, Request, Welcome,
};
use proptest::collection::vec;
use proptest::prelude::*;
use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

/// A request with tables of its own, from which the borrowed one is made.
#[derive(Clone, Debug)]
enum Asked {
    Read(u64, Vec<u32>),
    Write(u64, u64, Vec<(u32, u32)>),
    Discard(u64, u64, u32, u32),
    Allocate(u64, u8, u8, u64),
    Fill(u64, u32, u32, (u64, u64, u128, u16)),
    Confirm(u64, u64),
    Verify(u64, u32, u32),
    Sign(u64, u32, u32),
    Repair(u64, u32, u32, (u64, u64, u128, u16)),
    Free(u64),
    FreeAll,
    List(u64),
    Fence,
    Renew,
    Admit(String),
    Bequeath(String),
}

fn asked() -> impl Strategy<Value = Asked> {
    prop_oneof![
        (any::<u64>(), vec(any::<u32>(), 1..=MAX_PAGES)).prop_map(|(e, p)| Asked::Read(e, p)),
        (any::<(u64, u64)>(), vec(any::<(u32, u32)>(), 1..=MAX_PAGES))
            .prop_map(|((e, g), p)| Asked::Write(e, g, p)),
        any::<(u64, u64, u32, u32)>().prop_map(|(e, g, f, c)| Asked::Discard(e, g, f, c)),
        any::<(u64, u8, u8, u64)>().prop_map(|(s, m, o, g)| Asked::Allocate(s, m, o, g)),
        (any::<(u64, u32)>(), 0..=MAX_FILL, any::<(u64, u64, u128, u16)>())
            .prop_map(|((e, f), c, s)| Asked::Fill(e, f, c, s)),
        any::<(u64, u64)>().prop_map(|(e, g)| Asked::Confirm(e, g)),
        (any::<(u64, u32)>(), 1..=MAX_VERIFY).prop_map(|((e, f), c)| Asked::Verify(e, f, c)),
        (any::<(u64, u32)>(), 1..=MAX_VERIFY).prop_map(|((e, f), c)| Asked::Sign(e, f, c)),
        (any::<(u64, u32)>(), 1..=MAX_VERIFY, any::<(u64, u64, u128, u16)>())
            .prop_map(|((e, f), c, s)| Asked::Repair(e, f, c, s)),
        any::<u64>().prop_map(Asked::Free),
        Just(Asked::FreeAll),
        any::<u64>().prop_map(Asked::List),
        Just(Asked::Fence),
        Just(Asked::Renew),
        "[a-zß]{0,32}".prop_map(Asked::Admit),
        "[a-zß]{0,32}".prop_map(Asked::Bequeath),
    ]
}

fn with_request<R>(asked: &Asked, then: impl FnOnce(Request<'_>) -> R) -> R {
    match asked {
        Asked::Read(extent, pages) => then(Request::Read { extent: ExtentId(*extent), pages }),
        Asked::Write(extent, generation, pages) => {
            let (pages, sums): (Vec<u32>, Vec<u32>) = pages.iter().copied().unzip();
            let (extent, generation) = (ExtentId(*extent), Generation(*generation));
            then(Request::Write { extent, generation, pages: &pages, sums: &sums })
        }
        &Asked::Discard(extent, generation, first, count) => {
            let (extent, generation) = (ExtentId(extent), Generation(generation));
            then(Request::Discard { extent, generation, first, count })
        }
        &Asked::Allocate(segment, member, order, generation) => {
            let generation = Generation(generation);
            then(Request::Allocate { segment, member, order, generation })
        }
        &Asked::Fill(extent, first, count, source) => {
            let (extent, source) = (ExtentId(extent), source_of(source));
            then(Request::Fill { extent, first, count, source })
        }
        &Asked::Verify(extent, first, count) => {
            then(Request::Verify { extent: ExtentId(extent), first, count })
        }
        &Asked::Sign(extent, first, count) => {
            then(Request::Sign { extent: ExtentId(extent), first, count })
        }
        &Asked::Repair(extent, first, count, source) => {
            let (extent, source) = (ExtentId(extent), source_of(source));
            then(Request::Repair { extent, first, count, source })
        }
        &Asked::Confirm(extent, generation) => {
            let (extent, generation) = (ExtentId(extent), Generation(generation));
            then(Request::Confirm { extent, generation })
        }
        Asked::Free(extent) => then(Request::Free { extent: ExtentId(*extent) }),
        Asked::FreeAll => then(Request::FreeAll),
        Asked::List(from) => then(Request::List { from: ExtentId(*from) }),
        Asked::Fence => then(Request::Fence),
        Asked::Renew => then(Request::Renew),
        Asked::Admit(node) => then(Request::Admit { node }),
        Asked::Bequeath(node) => then(Request::Bequeath { node }),
    }
}

fn source_of((extent, boot, address, port): (u64, u64, u128, u16)) -> FillSource {
    // An IPv4 address has two forms, and comes back in its own.
    let address = SocketAddr::new(Ipv6Addr::from(address).to_canonical(), port);
    FillSource { address, boot, extent: ExtentId(extent) }
}

/// Extent, segment, member, order, pages written and generation.
type Line = (u64, u64, u8, u8, u32, u64);

#[derive(Clone, Debug)]
enum Answered {
    Pages(Vec<u32>),
    Done,
    Allocated(u64),
    Held(Vec<Line>),
    Verified(Vec<(u32, Option<bool>)>),
    Signed(Vec<[u8; 8]>),
    Refused(Refusal),
}

fn refusal() -> impl Strategy<Value = Refusal> {
    prop_oneof![
        Just(Refusal::Full),
        any::<u64>().prop_map(|epoch| Refusal::StaleEpoch(Epoch(epoch))),
        Just(Refusal::NoSuchExtent),
        Just(Refusal::OutOfBounds),
        any::<u32>().prop_map(Refusal::Corrupt),
        any::<(u16, u16)>().prop_map(|(oldest, newest)| Refusal::Version(oldest, newest)),
        Just(Refusal::Busy),
        Just(Refusal::NotFilling),
        Just(Refusal::NoSource),
        Just(Refusal::OtherNode),
    ]
}

fn load_of((free_pages, busyness): (u64, u32)) -> Load {
    let draining = busyness & 1 != 0;
    Load { free_pages, in_service: busyness >> 16, draining, recalled: busyness >> 1 & 0x7fff }
}

fn answered() -> impl Strategy<Value = Answered> {
    prop_oneof![
        vec(any::<u32>(), 1..=MAX_PAGES).prop_map(Answered::Pages),
        Just(Answered::Done),
        any::<u64>().prop_map(Answered::Allocated),
        vec(any::<Line>(), 0..=MAX_HELD).prop_map(Answered::Held),
        vec(any::<(u32, Option<bool>)>(), 1..=MAX_VERIFY as usize).prop_map(Answered::Verified),
        vec(any::<[u8; 8]>(), 1..=MAX_VERIFY as usize).prop_map(Answered::Signed),
        refusal().prop_map(Answered::Refused),
    ]
}

fn with_answer<R>(answered: &Answered, then: impl FnOnce(Answer<'_>) -> R) -> R {
    match answered {
        Answered::Pages(sums) => then(Answer::Pages(sums)),
        Answered::Done => then(Answer::Done),
        Answered::Allocated(extent) => then(Answer::Allocated(ExtentId(*extent))),
        Answered::Held(lines) => {
            let held = |&(extent, segment, member, order, written, generation): &Line| HeldExtent {
                extent: ExtentId(extent),
                segment,
                member,
                order,
                written,
                generation: Generation(generation),
            };
            let lines: Vec<HeldExtent> = lines.iter().map(held).collect();
            then(Answer::Held(&lines))
        }
        Answered::Signed(signatures) => then(Answer::Signed(signatures)),
        Answered::Verified(states) => {
            let state = |&(sum, is_sound): &(u32, Option<bool>)| match is_sound {
                None => PageState::Unwritten,
                Some(true) => PageState::Sound(sum),
                Some(false) => PageState::Damaged(sum),
            };
            let states: Vec<PageState> = states.iter().map(state).collect();
            then(Answer::Verified(&states))
        }
        Answered::Refused(refusal) => then(Answer::Refused(*refusal)),
    }
}

fn head_of(frame: &[u8]) -> Head {
    let head = frame.first_chunk::<HEAD_BYTES>().expect("a whole head");
    let head = Head::parse(head).expect("a good head");
    assert_eq!(frame.len(), HEAD_BYTES + head.table_bytes());
    assert!(frame.len() + head.payload_bytes() <= MAX_FRAME_BYTES);
    head
}

/// Reads bytes in every way that a peer's bytes are read.
fn decode_all(bytes: &[u8]) {
    if let Some(hello) = bytes.first_chunk::<HELLO_BYTES>() {
        let _ = decode_hello(hello);
    }
    if let Some(welcome) = bytes.first_chunk::<WELCOME_BYTES>() {
        let _ = decode_welcome(welcome);
    }
    let Some(head) = bytes.first_chunk::<HEAD_BYTES>() else { return };
    let Ok(head) = Head::parse(head) else { return };
    let frame = bytes.get(..HEAD_BYTES + head.table_bytes()).unwrap_or(bytes);
    let _ = decode_request(&head, frame, &mut RequestTables::default());
    let _ = decode_answer(&head, frame, &mut AnswerTables::default());
}

proptest! {
    #[test]
    fn requests_come_back(asked in asked(), id in any::<u64>()) {
        let mut frame = Vec::new();
        with_request(&asked, |request| {
            encode_request(&request, id, &mut frame);
            let head = head_of(&frame);
            prop_assert_eq!(head.id(), id);
            let mut tables = RequestTables::default();
            prop_assert_eq!(decode_request(&head, &frame, &mut tables), Ok(request));
            prop_assert!(decode_answer(&head, &frame, &mut AnswerTables::default()).is_err());
            Ok(())
        })?;
    }

    #[test]
    fn answers_come_back(answered in answered(), id in any::<u64>(), load in any::<(u64, u32)>()) {
        let load = load_of(load);
        let mut frame = Vec::new();
        with_answer(&answered, |answer| {
            encode_answer(&answer, id, load, &mut frame);
            let head = head_of(&frame);
            prop_assert_eq!(head.id(), id);
            let mut tables = AnswerTables::default();
            prop_assert_eq!(decode_answer(&head, &frame, &mut tables), Ok((answer, load)));
            prop_assert!(decode_request(&head, &frame, &mut RequestTables::default()).is_err());
            Ok(())
        })?;
    }

    #[test]
    fn greetings_come_back(
        numbers in any::<(u16, u16, u64, u64, u64, u32)>(),
        name in "\\PC{0,40}",
        refusal in refusal(),
    ) {
        let hello = Hello {
            versions: (numbers.0, numbers.1),
            space: SpaceId(numbers.2),
            epoch: Epoch(numbers.3),
            lane: numbers.4,
            lease: Duration::from_millis(numbers.5.into()),
            consumer: name.clone(),
        };
        let back = decode_hello(&encode_hello(&hello));
        let back = back.expect("a good greeting");
        prop_assert!(name.starts_with(&back.consumer) && back.consumer.len() <= MAX_NAME);
        prop_assert!(name.len() > MAX_NAME || back == hello);

        let welcome = Welcome {
            version: numbers.0,
            boot: numbers.2,
            donor: back.consumer,
            load: load_of((numbers.3, numbers.5)),
        };
        for welcome in [Ok(welcome), Err(refusal)] {
            prop_assert_eq!(decode_welcome(&encode_welcome(&welcome)), Ok(welcome));
        }
    }

    /// Bytes outside all fields must be zero: each greeting has exactly one encoding.
    #[test]
    fn a_changed_greeting_is_another_one_or_refused(
        name in "[a-z]{0,64}",
        refusal in refusal(),
        at in 0..HELLO_BYTES - 4,
        by in 1..=u8::MAX,
    ) {
        let hello = Hello {
            versions: (1, 2),
            space: SpaceId(3),
            epoch: Epoch(4),
            lane: 5,
            lease: Duration::from_secs(6),
            consumer: name.clone(),
        };
        let mut bytes = encode_hello(&hello);
        bytes[at] ^= by;
        seal_greeting(&mut bytes);
        if let Ok(other) = decode_hello(&bytes) {
            prop_assert_eq!(encode_hello(&other), bytes);
        }
        let load = Load { free_pages: 7, in_service: 8, ..Load::default() };
        for welcome in [Ok(Welcome { version: 1, boot: 2, donor: name, load }), Err(refusal)] {
            let mut bytes = encode_welcome(&welcome);
            bytes[at % (WELCOME_BYTES - 4)] ^= by;
            seal_greeting(&mut bytes);
            if let Ok(other) = decode_welcome(&bytes) {
                prop_assert_eq!(encode_welcome(&other), bytes);
            }
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in vec(any::<u8>(), 0..4096)) {
        decode_all(&bytes);
    }

    /// Random bytes hardly ever get past the first checks; a good frame with a few bytes changed
    /// does.
    #[test]
    fn damaged_frames_are_seen(
        asked in asked(),
        at in any::<prop::sample::Index>(),
        flip in 1..=255u8,
    ) {
        let mut frame = Vec::new();
        with_request(&asked, |request| encode_request(&request, 1, &mut frame));
        let at = at.index(frame.len());
        frame[at] ^= flip;
        decode_all(&frame);
        // A change of up to eight neighbouring bits cannot escape a CRC.
        let seen = match Head::parse(frame.first_chunk().expect("a whole head")) {
            Err(_) => true,
            Ok(head) => decode_request(&head, &frame, &mut RequestTables::default()).is_err(),
        };
        prop_assert!(seen, "byte {} of {:?}", at, asked);
    }
}
