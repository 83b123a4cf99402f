//! Frames: how the values of [`protocol`](crate::protocol) stand on the wire.
//!
//! A frame is a head of fixed size, a table (page numbers, sums, or held extents) and a payload of
//! whole pages. The lengths of table and payload follow from the head alone, so that a receiver
//! knows before it reads on how much will come and can bound its memory. The payload stands last
//! and is not looked at here: it goes straight between the socket and the memory that holds the
//! pages.
//!
//! The head's check covers head and table. The payload is covered by the pages' own sums, which
//! travel end to end; one sum over everything would be computed at each hop and protect less.
//!
//! Decoding is total: any bytes give a value or [`Malformed`], allocate no more than the largest
//! table, and never panic.

use crate::protocol::{
    Answer, FillSource, HeldExtent, Hello, Load, MAGIC, MAX_FILL, MAX_HELD, MAX_NAME, MAX_PAGES,
    MAX_VERIFY, PageState, Refusal, Request, Welcome,
};
use hecaton_memory::{Epoch, ExtentId, Generation, PAGE_SIZE, PageSignature, PageSum, SpaceId};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// Bytes of a frame's head.
pub const HEAD_BYTES: usize = 40;

/// Bytes of the largest table, which is that of [`Answer::Held`].
pub const MAX_TABLE_BYTES: usize = MAX_HELD * HELD_BYTES;

/// Bytes of the largest payload.
pub const MAX_PAYLOAD_BYTES: usize = MAX_PAGES * PAGE_SIZE;

/// Bytes of the largest frame.
pub const MAX_FRAME_BYTES: usize = HEAD_BYTES + MAX_TABLE_BYTES + MAX_PAYLOAD_BYTES;

/// Bytes of a [`Hello`].
pub const HELLO_BYTES: usize = 112;

/// Bytes of a [`Welcome`], or of the refusal that stands in its place.
pub const WELCOME_BYTES: usize = 100;

const HELD_BYTES: usize = 32;
const SOURCE_BYTES: usize = 40;
const STATE_BYTES: usize = 8;
const GENERATION_BYTES: usize = 8;
const NAME_BYTES: usize = MAX_NAME;

/// In the load's last word: the donor is draining.
const DRAINING: u32 = 1 << 31;

/// In the load's last word: place and maximum of the number of recalled extents.
const RECALLED_SHIFT: u32 = 16;
const MAX_RECALLED: u32 = (1 << 15) - 1;

/// The most requests in service that the load's last word can tell of.
const MAX_IN_SERVICE: u32 = (1 << RECALLED_SHIFT) - 1;

const CHECKED_HEAD_BYTES: usize = HEAD_BYTES - 4;

/// Why bytes are not a frame. The connection that they came over cannot be used any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The greeting does not begin with [`MAGIC`].
    #[error("the peer does not speak the page protocol")]
    Magic,
    /// A head with a kind that no version of the protocol has.
    #[error("unknown kind of frame {0:#04x}")]
    Kind(u8),
    /// A kind of frame that the connection's version does not have.
    #[error("frame of kind {0:#04x}, which version {1} does not have")]
    Version(u8, u16),
    /// A kind of frame that the other side sends.
    #[error("frame of kind {0:#04x} from the wrong side")]
    Side(u8),
    /// More pages or lines than a frame may have, or none where one is needed.
    #[error("frame of kind {kind:#04x} with a count of {count}")]
    Count {
        /// The frame's kind.
        kind: u8,
        /// The count in its head.
        count: u16,
    },
    /// A length that does not follow from kind and count.
    #[error("frame of kind {kind:#04x} with a length of {length} instead of {expected}")]
    Length {
        /// The frame's kind.
        kind: u8,
        /// The length in its head, in bytes.
        length: u32,
        /// The length that follows from kind and count, in bytes.
        expected: usize,
    },
    /// Head and table do not sum to the head's check.
    #[error("a frame's head does not match its checksum")]
    Check,
    /// A field with a value that it cannot have.
    #[error("a frame with a bad {0}")]
    Field(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    Read = 0x01,
    Write = 0x02,
    Discard = 0x03,
    Allocate = 0x04,
    Free = 0x05,
    FreeAll = 0x06,
    List = 0x07,
    Fence = 0x08,
    Renew = 0x09,
    Fill = 0x0a,
    Confirm = 0x0b,
    Verify = 0x0c,
    Repair = 0x0d,
    Sign = 0x0e,
    Admit = 0x0f,
    Bequeath = 0x10,
    Pages = 0x81,
    Done = 0x82,
    Allocated = 0x83,
    Held = 0x84,
    Refused = 0x85,
    Verified = 0x86,
    Signed = 0x87,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Kind> {
        use Kind::*;
        [
            Read, Write, Discard, Allocate, Free, FreeAll, List, Fence, Renew, Fill, Confirm,
            Verify, Repair, Sign, Admit, Bequeath, Pages, Done, Allocated, Held, Refused, Verified,
            Signed,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == byte)
    }

    /// Least and greatest count.
    fn counts(self) -> (usize, usize) {
        match self {
            Kind::Read | Kind::Write | Kind::Pages => (1, MAX_PAGES),
            Kind::Held => (0, MAX_HELD),
            Kind::Verified | Kind::Signed => (1, MAX_VERIFY as usize),
            _ => (0, 0),
        }
    }

    fn table_bytes(self, count: usize) -> usize {
        match self {
            Kind::Read | Kind::Pages => count * 4,
            Kind::Write => count * 8,
            Kind::Held => count * HELD_BYTES,
            Kind::Discard => GENERATION_BYTES,
            Kind::Verified => count * STATE_BYTES,
            Kind::Signed => count * size_of::<PageSignature>(),
            Kind::Fill | Kind::Repair => SOURCE_BYTES,
            Kind::Admit | Kind::Bequeath => NAME_BYTES,
            _ => 0,
        }
    }

    fn payload_bytes(self, count: usize) -> usize {
        match self {
            Kind::Write | Kind::Pages => count * PAGE_SIZE,
            _ => 0,
        }
    }
}

/// A frame's head: fixed fields whose meaning depends on the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    kind: Kind,
    code: u8,
    count: u16,
    id: u64,
    subject: u64,
    detail: u64,
    extra: u32,
    check: u32,
}

impl Head {
    /// Reads a head and finds out how long its frame is. The lengths are bounded and can be used at
    /// once. All else counts only after [`decode_request`] or [`decode_answer`] has checked it
    /// together with the table.
    pub fn parse(bytes: &[u8; HEAD_BYTES]) -> Result<Head, Malformed> {
        let kind = Kind::from_byte(bytes[4]).ok_or(Malformed::Kind(bytes[4]))?;
        let count = u16_at(bytes, 6);
        let (least, most) = kind.counts();
        if !(least..=most).contains(&usize::from(count)) {
            return Err(Malformed::Count { kind: kind as u8, count });
        }
        let head = Head {
            kind,
            code: bytes[5],
            count,
            id: u64_at(bytes, 8),
            subject: u64_at(bytes, 16),
            detail: u64_at(bytes, 24),
            extra: u32_at(bytes, 32),
            check: u32_at(bytes, 36),
        };
        let length = u32_at(bytes, 0);
        let expected = head.table_bytes() + head.payload_bytes();
        if length as usize != expected {
            return Err(Malformed::Length { kind: kind as u8, length, expected });
        }
        Ok(head)
    }

    /// The request that the frame is, or answers.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Refuses a request of a later version than the one that is spoken.
    pub(crate) fn check_version(
        &self,
        request: &Request<'_>,
        version: u16,
    ) -> Result<(), Malformed> {
        match request.since() <= version {
            true => Ok(()),
            false => Err(Malformed::Version(self.kind as u8, version)),
        }
    }

    /// Whether it is a request for pages, or to store some.
    pub fn is_read_or_write(&self) -> bool {
        matches!(self.kind, Kind::Read | Kind::Write)
    }

    /// Bytes of the table, right behind the head; at most [`MAX_TABLE_BYTES`].
    pub fn table_bytes(&self) -> usize {
        self.kind.table_bytes(usize::from(self.count))
    }

    /// Bytes of the payload, right behind the table: whole pages, at most [`MAX_PAYLOAD_BYTES`].
    pub fn payload_bytes(&self) -> usize {
        self.kind.payload_bytes(usize::from(self.count))
    }

    /// Writes a frame without its payload.
    fn encode(self, out: &mut Vec<u8>, table: impl FnOnce(&mut Vec<u8>)) {
        let length = self.table_bytes() + self.payload_bytes();
        out.clear();
        out.extend_from_slice(&(length as u32).to_le_bytes());
        out.extend_from_slice(&[self.kind as u8, self.code]);
        out.extend_from_slice(&self.count.to_le_bytes());
        out.extend_from_slice(&self.id.to_le_bytes());
        out.extend_from_slice(&self.subject.to_le_bytes());
        out.extend_from_slice(&self.detail.to_le_bytes());
        out.extend_from_slice(&self.extra.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        table(out);
        debug_assert_eq!(out.len(), HEAD_BYTES + self.table_bytes());
        seal_frame(out);
    }

    fn new(kind: Kind, count: usize, id: u64) -> Head {
        let (least, most) = kind.counts();
        assert!((least..=most).contains(&count), "{kind:?} with a count of {count}");
        let count = count as u16;
        Head { kind, code: 0, count, id, subject: 0, detail: 0, extra: 0, check: 0 }
    }

    fn verify(&self, frame: &[u8]) -> Result<(), Malformed> {
        if frame.len() != HEAD_BYTES + self.table_bytes() || check_of(frame) != self.check {
            return Err(Malformed::Check);
        }
        Ok(())
    }

    /// Refuses a head with something in a field that its kind does not use, so that later versions
    /// may give the field a meaning.
    fn only(&self, code: bool, subject: bool, detail: bool, extra: bool) -> Result<(), Malformed> {
        let unused = [
            (code, self.code == 0),
            (subject, self.subject == 0),
            (detail, self.detail == 0),
            (extra, self.extra == 0),
        ];
        match unused.iter().all(|(used, zero)| *used || *zero) {
            true => Ok(()),
            false => Err(Malformed::Field("unused field")),
        }
    }
}

/// Room for the tables of requests, used again for each.
#[derive(Debug, Default)]
pub struct RequestTables {
    pages: Vec<u32>,
    sums: Vec<PageSum>,
    name: String,
}

/// Room for the tables of answers, used again for each.
#[derive(Debug, Default)]
pub struct AnswerTables {
    sums: Vec<PageSum>,
    held: Vec<HeldExtent>,
    states: Vec<PageState>,
    signatures: Vec<PageSignature>,
}

impl AnswerTables {
    /// The sums of the answer decoded last, if it was [`Answer::Pages`].
    pub fn sums(&self) -> &[PageSum] {
        &self.sums
    }
}

/// Writes a request's head and table into `out`, replacing what is there. The payload of a
/// [`Request::Write`] is to follow.
///
/// A name longer than [`MAX_NAME`] is cut.
///
/// # Panics
/// If the request names no pages or more than [`MAX_PAGES`], or other sums than pages.
pub fn encode_request(request: &Request<'_>, id: u64, out: &mut Vec<u8>) {
    let no_table = |_: &mut Vec<u8>| {};
    match *request {
        Request::Read { extent, pages } => {
            let head = Head { subject: extent.0, ..Head::new(Kind::Read, pages.len(), id) };
            head.encode(out, |out| put_u32s(out, pages));
        }
        Request::Write { extent, generation, pages, sums } => {
            assert_eq!(pages.len(), sums.len(), "a page without a sum");
            let head = Head::new(Kind::Write, pages.len(), id);
            let head = Head { subject: extent.0, detail: generation.0, ..head };
            head.encode(out, |out| {
                put_u32s(out, pages);
                put_u32s(out, sums);
            });
        }
        Request::Discard { extent, generation, first, count } => {
            let detail = run_to_word(first, count);
            let head = Head { subject: extent.0, detail, ..Head::new(Kind::Discard, 0, id) };
            head.encode(out, |out| out.extend_from_slice(&generation.0.to_le_bytes()));
        }
        Request::Allocate { segment, member, order, generation } => {
            let head = Head::new(Kind::Allocate, 0, id);
            let (detail, extra) = (generation.0, u32::from(order));
            Head { code: member, subject: segment, detail, extra, ..head }.encode(out, no_table);
        }
        Request::Fill { extent, first, count, source } => {
            let detail = run_to_word(first, count);
            let head = Head { subject: extent.0, detail, ..Head::new(Kind::Fill, 0, id) };
            head.encode(out, |out| put_source(out, source));
        }
        Request::Confirm { extent, generation } => {
            let head = Head::new(Kind::Confirm, 0, id);
            Head { subject: extent.0, detail: generation.0, ..head }.encode(out, no_table);
        }
        Request::Verify { extent, first, count } => {
            let detail = run_to_word(first, count);
            let head = Head::new(Kind::Verify, 0, id);
            Head { subject: extent.0, detail, ..head }.encode(out, no_table);
        }
        Request::Sign { extent, first, count } => {
            let detail = run_to_word(first, count);
            let head = Head::new(Kind::Sign, 0, id);
            Head { subject: extent.0, detail, ..head }.encode(out, no_table);
        }
        Request::Repair { extent, first, count, source } => {
            let detail = run_to_word(first, count);
            let head = Head { subject: extent.0, detail, ..Head::new(Kind::Repair, 0, id) };
            head.encode(out, |out| put_source(out, source));
        }
        Request::Free { extent } => {
            Head { subject: extent.0, ..Head::new(Kind::Free, 0, id) }.encode(out, no_table);
        }
        Request::FreeAll => Head::new(Kind::FreeAll, 0, id).encode(out, no_table),
        Request::List { from } => {
            Head { subject: from.0, ..Head::new(Kind::List, 0, id) }.encode(out, no_table);
        }
        Request::Fence => Head::new(Kind::Fence, 0, id).encode(out, no_table),
        Request::Renew => Head::new(Kind::Renew, 0, id).encode(out, no_table),
        Request::Admit { node } => encode_node(Kind::Admit, node, id, out),
        Request::Bequeath { node } => encode_node(Kind::Bequeath, node, id, out),
    }
}

/// A request that names a node, and nothing else.
fn encode_node(kind: Kind, node: &str, id: u64, out: &mut Vec<u8>) {
    let mut name = [0; NAME_BYTES];
    let code = put_name(node, &mut name);
    Head { code, ..Head::new(kind, 0, id) }.encode(out, |out| out.extend_from_slice(&name));
}

/// Reads a request from `frame`, which is the head and the table that `head` tells of.
pub fn decode_request<'a>(
    head: &Head,
    frame: &[u8],
    tables: &'a mut RequestTables,
) -> Result<Request<'a>, Malformed> {
    head.verify(frame)?;
    let table = &frame[HEAD_BYTES..];
    let (extent, generation) = (ExtentId(head.subject), Generation(head.detail));
    match head.kind {
        Kind::Read => {
            head.only(false, true, false, false)?;
            take_u32s(table, &mut tables.pages);
            Ok(Request::Read { extent, pages: &tables.pages })
        }
        Kind::Write => {
            head.only(false, true, true, false)?;
            let (pages, sums) = table.split_at(table.len() / 2);
            take_u32s(pages, &mut tables.pages);
            take_u32s(sums, &mut tables.sums);
            Ok(Request::Write { extent, generation, pages: &tables.pages, sums: &tables.sums })
        }
        Kind::Discard => {
            head.only(false, true, true, false)?;
            let (first, count) = run_from_word(head.detail);
            let generation = Generation(u64_at(table, 0));
            Ok(Request::Discard { extent, generation, first, count })
        }
        Kind::Allocate => {
            head.only(true, true, true, true)?;
            let order = u8::try_from(head.extra).map_err(|_| Malformed::Field("order"))?;
            Ok(Request::Allocate { segment: head.subject, member: head.code, order, generation })
        }
        Kind::Fill => {
            head.only(false, true, true, false)?;
            let (first, count) = run_from_word(head.detail);
            if count > MAX_FILL {
                return Err(Malformed::Field("count of pages to fill"));
            }
            Ok(Request::Fill { extent, first, count, source: take_source(table)? })
        }
        Kind::Confirm => {
            head.only(false, true, true, false)?;
            Ok(Request::Confirm { extent, generation })
        }
        Kind::Verify => {
            head.only(false, true, true, false)?;
            let (first, count) = run_to_verify(head.detail)?;
            Ok(Request::Verify { extent, first, count })
        }
        Kind::Sign => {
            head.only(false, true, true, false)?;
            let (first, count) = run_to_verify(head.detail)?;
            Ok(Request::Sign { extent, first, count })
        }
        Kind::Repair => {
            head.only(false, true, true, false)?;
            let (first, count) = run_to_verify(head.detail)?;
            Ok(Request::Repair { extent, first, count, source: take_source(table)? })
        }
        Kind::Free => head.only(false, true, false, false).map(|()| Request::Free { extent }),
        Kind::List => head.only(false, true, false, false).map(|()| Request::List { from: extent }),
        Kind::FreeAll => head.only(false, false, false, false).map(|()| Request::FreeAll),
        Kind::Fence => head.only(false, false, false, false).map(|()| Request::Fence),
        Kind::Renew => head.only(false, false, false, false).map(|()| Request::Renew),
        Kind::Admit | Kind::Bequeath => {
            head.only(true, false, false, false)?;
            tables.name = take_name(head.code, table)?;
            let node = tables.name.as_str();
            match table[node.len()..].iter().all(|&byte| byte == 0) {
                true if head.kind == Kind::Admit => Ok(Request::Admit { node }),
                true => Ok(Request::Bequeath { node }),
                false => Err(Malformed::Field("name")),
            }
        }
        Kind::Pages
        | Kind::Done
        | Kind::Allocated
        | Kind::Held
        | Kind::Refused
        | Kind::Verified
        | Kind::Signed => Err(Malformed::Side(head.kind as u8)),
    }
}

/// Writes an answer's head and table into `out`, replacing what is there. The payload of
/// [`Answer::Pages`] is to follow.
///
/// # Panics
/// If the answer has no pages or more than [`MAX_PAGES`], more lines than [`MAX_HELD`], or states
/// or signatures of no pages or more than [`MAX_VERIFY`].
pub fn encode_answer(answer: &Answer<'_>, id: u64, load: Load, out: &mut Vec<u8>) {
    let no_table = |_: &mut Vec<u8>| {};
    let head = |kind, count| Head {
        detail: load.free_pages,
        extra: busyness_to_word(load),
        ..Head::new(kind, count, id)
    };
    match *answer {
        Answer::Pages(sums) => {
            head(Kind::Pages, sums.len()).encode(out, |out| put_u32s(out, sums));
        }
        Answer::Done => head(Kind::Done, 0).encode(out, no_table),
        Answer::Allocated(extent) => {
            Head { subject: extent.0, ..head(Kind::Allocated, 0) }.encode(out, no_table);
        }
        Answer::Held(lines) => head(Kind::Held, lines.len()).encode(out, |out| {
            for line in lines {
                out.extend_from_slice(&line.extent.0.to_le_bytes());
                out.extend_from_slice(&line.segment.to_le_bytes());
                out.extend_from_slice(&[line.member, line.order, 0, 0]);
                out.extend_from_slice(&line.written.to_le_bytes());
                out.extend_from_slice(&line.generation.0.to_le_bytes());
            }
        }),
        Answer::Verified(states) => {
            head(Kind::Verified, states.len()).encode(out, |out| put_states(out, states));
        }
        Answer::Signed(signatures) => {
            head(Kind::Signed, signatures.len())
                .encode(out, |out| out.extend_from_slice(signatures.as_flattened()));
        }
        Answer::Refused(refusal) => {
            let (code, subject) = refusal_to_code(refusal);
            Head { code, subject, ..head(Kind::Refused, 0) }.encode(out, no_table);
        }
    }
}

/// Reads an answer and its load from `frame`, which is the head and the table that `head` tells of.
pub fn decode_answer<'a>(
    head: &Head,
    frame: &[u8],
    tables: &'a mut AnswerTables,
) -> Result<(Answer<'a>, Load), Malformed> {
    head.verify(frame)?;
    let table = &frame[HEAD_BYTES..];
    let load = load_from_words(head.detail, head.extra);
    let answer = match head.kind {
        Kind::Pages => {
            head.only(false, false, true, true)?;
            take_u32s(table, &mut tables.sums);
            Answer::Pages(&tables.sums)
        }
        Kind::Done => {
            head.only(false, false, true, true)?;
            Answer::Done
        }
        Kind::Allocated => {
            head.only(false, true, true, true)?;
            Answer::Allocated(ExtentId(head.subject))
        }
        Kind::Held => {
            head.only(false, false, true, true)?;
            tables.held.clear();
            for line in table.chunks_exact(HELD_BYTES) {
                if line[18..20].iter().any(|&byte| byte != 0) {
                    return Err(Malformed::Field("held extent"));
                }
                tables.held.push(HeldExtent {
                    extent: ExtentId(u64_at(line, 0)),
                    segment: u64_at(line, 8),
                    member: line[16],
                    order: line[17],
                    written: u32_at(line, 20),
                    generation: Generation(u64_at(line, 24)),
                });
            }
            Answer::Held(&tables.held)
        }
        Kind::Verified => {
            head.only(false, false, true, true)?;
            take_states(table, &mut tables.states)?;
            Answer::Verified(&tables.states)
        }
        Kind::Signed => {
            head.only(false, false, true, true)?;
            tables.signatures.clear();
            tables.signatures.extend_from_slice(table.as_chunks().0);
            Answer::Signed(&tables.signatures)
        }
        Kind::Refused => Answer::Refused(refusal_from_code(head.code, head.subject)?),
        _ => return Err(Malformed::Side(head.kind as u8)),
    };
    Ok((answer, load))
}

/// Writes the greeting of a borrower. A name longer than [`MAX_NAME`] is cut.
pub fn encode_hello(hello: &Hello) -> [u8; HELLO_BYTES] {
    let mut out = [0; HELLO_BYTES];
    out[..4].copy_from_slice(&MAGIC);
    out[4..6].copy_from_slice(&hello.versions.0.to_le_bytes());
    out[6..8].copy_from_slice(&hello.versions.1.to_le_bytes());
    out[8..16].copy_from_slice(&hello.space.0.to_le_bytes());
    out[16..24].copy_from_slice(&hello.epoch.0.to_le_bytes());
    out[24..32].copy_from_slice(&hello.lane.to_le_bytes());
    let lease_ms = u64::try_from(hello.lease.as_millis()).unwrap_or(u64::MAX);
    out[32..40].copy_from_slice(&lease_ms.to_le_bytes());
    out[40] = put_name(&hello.consumer, &mut out[44..108]);
    seal_greeting(&mut out);
    out
}

/// Reads the greeting of a borrower.
pub fn decode_hello(bytes: &[u8; HELLO_BYTES]) -> Result<Hello, Malformed> {
    unseal(bytes)?;
    let hello = Hello {
        versions: (u16_at(bytes, 4), u16_at(bytes, 6)),
        space: SpaceId(u64_at(bytes, 8)),
        epoch: Epoch(u64_at(bytes, 16)),
        lane: u64_at(bytes, 24),
        lease: Duration::from_millis(u64_at(bytes, 32)),
        consumer: take_name(bytes[40], &bytes[44..108])?,
    };
    // Anything else than zeros in unused fields and behind the name would be lost.
    match encode_hello(&hello) == *bytes {
        true => Ok(hello),
        false => Err(Malformed::Field("unused field")),
    }
}

/// Writes the greeting of a donor, or why there is none. A name longer than [`MAX_NAME`] is cut.
pub fn encode_welcome(welcome: &Result<Welcome, Refusal>) -> [u8; WELCOME_BYTES] {
    let mut out = [0; WELCOME_BYTES];
    out[..4].copy_from_slice(&MAGIC);
    match welcome {
        Ok(welcome) => {
            out[4..6].copy_from_slice(&welcome.version.to_le_bytes());
            out[7] = put_name(&welcome.donor, &mut out[32..96]);
            out[8..16].copy_from_slice(&welcome.boot.to_le_bytes());
            out[16..24].copy_from_slice(&welcome.load.free_pages.to_le_bytes());
            out[24..28].copy_from_slice(&busyness_to_word(welcome.load).to_le_bytes());
        }
        Err(refusal) => {
            let (code, subject) = refusal_to_code(*refusal);
            out[6] = code;
            out[8..16].copy_from_slice(&subject.to_le_bytes());
        }
    }
    seal_greeting(&mut out);
    out
}

/// Reads the greeting of a donor, or why there is none.
pub fn decode_welcome(bytes: &[u8; WELCOME_BYTES]) -> Result<Result<Welcome, Refusal>, Malformed> {
    unseal(bytes)?;
    let welcome = match bytes[6] {
        0 => Ok(Welcome {
            version: u16_at(bytes, 4),
            boot: u64_at(bytes, 8),
            donor: take_name(bytes[7], &bytes[32..96])?,
            load: load_from_words(u64_at(bytes, 16), u32_at(bytes, 24)),
        }),
        code => Err(refusal_from_code(code, u64_at(bytes, 8))?),
    };
    // As in a hello.
    match encode_welcome(&welcome) == *bytes {
        true => Ok(welcome),
        false => Err(Malformed::Field("unused field")),
    }
}

fn run_to_word(first: u32, count: u32) -> u64 {
    u64::from(first) | u64::from(count) << 32
}

fn run_from_word(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// The run of a verification or a repair, which has an answer of a line for each of its pages.
fn run_to_verify(word: u64) -> Result<(u32, u32), Malformed> {
    let (first, count) = run_from_word(word);
    match (1..=MAX_VERIFY).contains(&count) {
        true => Ok((first, count)),
        false => Err(Malformed::Field("count of pages to verify")),
    }
}

fn busyness_to_word(load: Load) -> u32 {
    load.in_service.min(MAX_IN_SERVICE)
        | load.recalled.min(MAX_RECALLED) << RECALLED_SHIFT
        | if load.draining { DRAINING } else { 0 }
}

fn load_from_words(free_pages: u64, busyness: u32) -> Load {
    Load {
        free_pages,
        in_service: busyness & MAX_IN_SERVICE,
        draining: busyness & DRAINING != 0,
        recalled: busyness >> RECALLED_SHIFT & MAX_RECALLED,
    }
}

/// Extent, life, address (as IPv6, which has a place for IPv4) and port.
fn put_source(out: &mut Vec<u8>, source: FillSource) {
    let address = match source.address.ip() {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    out.extend_from_slice(&source.extent.0.to_le_bytes());
    out.extend_from_slice(&source.boot.to_le_bytes());
    out.extend_from_slice(&address.octets());
    out.extend_from_slice(&source.address.port().to_le_bytes());
    out.extend_from_slice(&[0; 6]);
}

fn take_source(table: &[u8]) -> Result<FillSource, Malformed> {
    let mut octets = [0; 16];
    octets.copy_from_slice(&table[16..32]);
    if table[34..SOURCE_BYTES].iter().any(|&byte| byte != 0) {
        return Err(Malformed::Field("source of a fill"));
    }
    Ok(FillSource {
        extent: ExtentId(u64_at(table, 0)),
        boot: u64_at(table, 8),
        address: SocketAddr::new(Ipv6Addr::from(octets).to_canonical(), u16_at(table, 32)),
    })
}

/// Writes each page's sum and state.
fn put_states(out: &mut Vec<u8>, states: &[PageState]) {
    for state in states {
        let (sum, code) = match *state {
            PageState::Unwritten => (0, 0),
            PageState::Sound(sum) => (sum, 1),
            PageState::Damaged(sum) => (sum, 2),
        };
        out.extend_from_slice(&sum.to_le_bytes());
        out.extend_from_slice(&[code, 0, 0, 0]);
    }
}

fn take_states(table: &[u8], states: &mut Vec<PageState>) -> Result<(), Malformed> {
    states.clear();
    for line in table.chunks_exact(STATE_BYTES) {
        states.push(match (u32_at(line, 0), u32_at(line, 4)) {
            (0, 0) => PageState::Unwritten,
            (sum, 1) => PageState::Sound(sum),
            (sum, 2) => PageState::Damaged(sum),
            _ => return Err(Malformed::Field("state of a page")),
        });
    }
    Ok(())
}

fn refusal_to_code(refusal: Refusal) -> (u8, u64) {
    match refusal {
        Refusal::Full => (1, 0),
        Refusal::StaleEpoch(epoch) => (2, epoch.0),
        Refusal::NoSuchExtent => (3, 0),
        Refusal::OutOfBounds => (4, 0),
        Refusal::Corrupt(place) => (5, u64::from(place)),
        Refusal::Version(oldest, newest) => (6, u64::from(oldest) | u64::from(newest) << 16),
        Refusal::Busy => (7, 0),
        Refusal::NotFilling => (8, 0),
        Refusal::NoSource => (9, 0),
        Refusal::OtherNode => (10, 0),
    }
}

fn refusal_from_code(code: u8, subject: u64) -> Result<Refusal, Malformed> {
    let refusal = match code {
        1 => Refusal::Full,
        2 => Refusal::StaleEpoch(Epoch(subject)),
        3 => Refusal::NoSuchExtent,
        4 => Refusal::OutOfBounds,
        5 => Refusal::Corrupt(subject as u32),
        6 => Refusal::Version(subject as u16, (subject >> 16) as u16),
        7 => Refusal::Busy,
        8 => Refusal::NotFilling,
        9 => Refusal::NoSource,
        10 => Refusal::OtherNode,
        _ => return Err(Malformed::Field("refusal")),
    };
    match refusal_to_code(refusal) == (code, subject) {
        true => Ok(refusal),
        false => Err(Malformed::Field("refusal")),
    }
}

/// The check of a head and its table, the check's own four bytes left out.
fn check_of(frame: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    digest.update(&frame[..CHECKED_HEAD_BYTES]);
    digest.update(&frame[HEAD_BYTES..]);
    digest.finalize() as u32
}

/// Puts the check of a head and its table into the head. Encoding calls it; tests call it to forge
/// frames.
///
/// # Panics
/// If there is no whole head.
pub fn seal_frame(frame: &mut [u8]) {
    let check = check_of(frame);
    frame[CHECKED_HEAD_BYTES..HEAD_BYTES].copy_from_slice(&check.to_le_bytes());
}

/// Puts a greeting's check into its last four bytes. Encoding does it; by itself it is for tests
/// that forge greetings.
///
/// # Panics
/// If there are fewer than four bytes.
pub fn seal_greeting(greeting: &mut [u8]) {
    let end = greeting.len() - 4;
    let check = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &greeting[..end]) as u32;
    greeting[end..].copy_from_slice(&check.to_le_bytes());
}

fn unseal(greeting: &[u8]) -> Result<(), Malformed> {
    if greeting[..4] != MAGIC {
        return Err(Malformed::Magic);
    }
    let end = greeting.len() - 4;
    let check = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &greeting[..end]) as u32;
    match u32_at(greeting, end) == check {
        true => Ok(()),
        false => Err(Malformed::Check),
    }
}

fn put_name(name: &str, out: &mut [u8]) -> u8 {
    let mut end = name.len().min(MAX_NAME);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    out[..end].copy_from_slice(&name.as_bytes()[..end]);
    end as u8
}

fn take_name(length: u8, bytes: &[u8]) -> Result<String, Malformed> {
    let name = bytes.get(..usize::from(length)).ok_or(Malformed::Field("name"))?;
    let name = std::str::from_utf8(name).map_err(|_| Malformed::Field("name"))?;
    Ok(name.to_owned())
}

fn put_u32s(out: &mut Vec<u8>, values: &[u32]) {
    for value in values {
        out.extend_from_slice(&value.to_le_bytes());
    }
}

fn take_u32s(table: &[u8], values: &mut Vec<u32>) {
    values.clear();
    values.extend(table.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)));
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
