//! Encodes and decodes the messages of the NBD protocol.
//!
//! All integers are big-endian. Decoders take a message of fixed length, or a payload whose length
//! was checked, and never panic. A message that cannot be understood well enough to go on is
//! [`Malformed`] and ends the connection.

/// First number of the greeting.
pub const GREETING: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// First number of each option, and the second one of the greeting.
pub const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
/// First number of each answer to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First number of each request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First number of each simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First number of each chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags: fixed newstyle. The same bit is the client's word for it.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1;
/// Handshake flags: no 124 zeros after an export that is chosen by `NBD_OPT_EXPORT_NAME`.
pub const FLAG_NO_ZEROES: u16 = 2;

/// Longest data of a read or write: the limit that clients may assume without asking.
pub const MAX_PAYLOAD: u32 = 32 << 20;

/// Longest payload of an option: an export's name of 4096 bytes and some information requests.
pub const MAX_OPTION_BYTES: u32 = 16 << 10;

/// Options of the handshake.
pub mod option {
    /// Chooses an export, the old way.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the handshake.
    pub const ABORT: u32 = 2;
    /// Asks for the names of all exports.
    pub const LIST: u32 = 3;
    /// Asks for TLS, with nothing agreed upon from then on.
    pub const START_TLS: u32 = 5;
    /// Asks about an export.
    pub const INFO: u32 = 6;
    /// Chooses an export.
    pub const GO: u32 = 7;
    /// Asks for structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Asks what can be told of an export's bytes.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Chooses what of that is to be told.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Answers to options.
pub mod answer {
    /// Done.
    pub const ACK: u32 = 1;
    /// An export's name.
    pub const SERVER: u32 = 2;
    /// Something about an export.
    pub const INFO: u32 = 3;
    /// A context, with the number that stands for it.
    pub const META_CONTEXT: u32 = 4;
    /// The option is not known.
    pub const ERR_UNSUPPORTED: u32 = 1 << 31 | 1;
    /// The client may not have it.
    pub const ERR_POLICY: u32 = 1 << 31 | 2;
    /// The option's data are not what they should be.
    pub const ERR_INVALID: u32 = 1 << 31 | 3;
    /// Nothing but TLS is to be asked for.
    pub const ERR_TLS_REQUIRED: u32 = 1 << 31 | 5;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = 1 << 31 | 6;
}

/// Kinds of information about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Its name.
    pub const NAME: u16 = 1;
    /// Bounds of requests.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags of an export.
pub mod transmission {
    /// This field means something.
    pub const HAS_FLAGS: u16 = 1;
    /// Nothing may be written.
    pub const READ_ONLY: u16 = 1 << 1;
    /// Flushes.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// Writes that are to be safe before they are answered.
    pub const SEND_FUA: u16 = 1 << 3;
    /// Trims.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// Writes of zeros.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// Reads that are to be answered in one part.
    pub const SEND_DF: u16 = 1 << 7;
    /// Every connection sees what another one has written and flushed.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// Flags of requests.
pub mod flag {
    /// To be safe before it is answered.
    pub const FUA: u16 = 1;
    /// Zeros are to take room.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Not to be answered in parts.
    pub const DF: u16 = 1 << 2;
    /// The status of the first extent only.
    pub const REQ_ONE: u16 = 1 << 3;
}

/// Parts of a structured reply.
pub mod chunk {
    /// The last one.
    pub const DONE: u16 = 1;
    /// Data at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeros at an offset.
    pub const OFFSET_HOLE: u16 = 2;
    /// The status of extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// An error.
    pub const ERROR: u16 = 1 << 15 | 1;
    /// An error, and its offset.
    pub const ERROR_OFFSET: u16 = 1 << 15 | 2;
}

/// Metadata context that says whether an export's bytes are stored.
pub mod allocation {
    /// The context's name.
    pub const NAME: &str = "base:allocation";
    /// All contexts of its name space; in a list, a question may ask for them so.
    pub const NAMESPACE: &str = "base:";
    /// The number that stands for it in a reply.
    pub const ID: u32 = 1;
    /// State of an extent: it takes no room.
    pub const HOLE: u32 = 1;
    /// State of an extent: it is read as zeros.
    pub const ZERO: u32 = 2;
}

/// Why a request failed: numbers of Linux, whatever the host is.
pub mod errno {
    /// Nothing may be written.
    pub const EPERM: u32 = 1;
    /// The data cannot be had, or kept.
    pub const EIO: u32 = 5;
    /// The request is not one that can be.
    pub const EINVAL: u32 = 22;
    /// There is no room, or the bytes are beyond the end.
    pub const ENOSPC: u32 = 28;
    /// The server is about to end.
    pub const ESHUTDOWN: u32 = 108;
}

/// Violations of the protocol that end a connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Not the number that a message of this kind begins with.
    #[error("{what} begins with {found:#x}")]
    Magic {
        /// The kind of message.
        what: &'static str,
        /// How it begins.
        found: u64,
    },
    /// Flags that the client may not set.
    #[error("the client's flags are {0:#x}")]
    ClientFlags(u32),
    /// An option with more data than any has.
    #[error("an option of {0} bytes; the most is {MAX_OPTION_BYTES}")]
    OptionTooLong(u32),
    /// A write of more data than is taken.
    #[error("a write of {0} bytes; the most is {MAX_PAYLOAD}")]
    WriteTooLong(u32),
    /// The old way to choose an export has no answer for one that is not there.
    #[error("there is no export `{0}`")]
    NoSuchExport(String),
    /// That way has no answer for a client that is to be refused, either.
    #[error("{0}")]
    Refused(String),
    /// More options than a client needs.
    #[error("more than {0} options")]
    TooManyOptions(usize),
}

/// Options that a client has negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Session {
    /// Reads are answered with structured replies.
    pub structured: bool,
    /// The client may ask for the status of blocks: the context [`allocation`].
    pub allocation: bool,
    /// It may not write.
    pub read_only: bool,
}

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Data.
    Read,
    /// To store the data that follow.
    Write,
    /// The end of the connection.
    Disconnect,
    /// That what was written is safe.
    Flush,
    /// To drop data.
    Trim,
    /// To store zeros.
    WriteZeroes,
    /// Which bytes are stored.
    BlockStatus,
    /// Something else.
    Unknown(u16),
}

/// A request, without the data that follow a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// [`flag`]s.
    pub flags: u16,
    /// Kind of the request.
    pub command: Command,
    /// The client's name for the request.
    pub cookie: u64,
    /// Where.
    pub offset: u64,
    /// How many bytes.
    pub length: u32,
}

impl Request {
    /// Bytes of a request.
    pub const BYTES: usize = 28;

    /// Decodes a request.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Request, Malformed> {
        let mut fields = Fields(bytes);
        let magic = fields.u32();
        if magic != REQUEST_MAGIC {
            return Err(Malformed::Magic { what: "a request", found: magic.into() });
        }
        let flags = fields.u16();
        let command = match fields.u16() {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::Disconnect,
            3 => Command::Flush,
            4 => Command::Trim,
            6 => Command::WriteZeroes,
            7 => Command::BlockStatus,
            other => Command::Unknown(other),
        };
        let (cookie, offset, length) = (fields.u64(), fields.u64(), fields.u32());
        if command == Command::Write && length > MAX_PAYLOAD {
            return Err(Malformed::WriteTooLong(length));
        }
        Ok(Request { flags, command, cookie, offset, length })
    }

    /// Checks the request against an export of `size` bytes. The error is the number for the
    /// answer.
    pub fn check(&self, size: u64, session: Session) -> Result<(), u32> {
        let known = match self.command {
            Command::Read if session.structured => flag::FUA | flag::DF,
            Command::WriteZeroes => flag::FUA | flag::NO_HOLE,
            Command::BlockStatus if session.allocation => flag::FUA | flag::REQ_ONE,
            Command::BlockStatus | Command::Unknown(_) => return Err(errno::EINVAL),
            _ => flag::FUA,
        };
        if self.flags & !known != 0 {
            return Err(errno::EINVAL);
        }
        if matches!(self.command, Command::Flush | Command::Disconnect) {
            return Ok(());
        }
        let writes = matches!(self.command, Command::Write | Command::Trim | Command::WriteZeroes);
        if writes && session.read_only {
            return Err(errno::EPERM);
        }
        if self.length == 0 || self.command == Command::Read && self.length > MAX_PAYLOAD {
            return Err(errno::EINVAL);
        }
        let end = self.offset.checked_add(self.length.into());
        match end.is_some_and(|end| end <= size) {
            true => Ok(()),
            false if self.command == Command::Write => Err(errno::ENOSPC),
            false => Err(errno::EINVAL),
        }
    }
}

/// The head of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHead {
    /// One of [`option`], or another.
    pub option: u32,
    /// Bytes of data that follow.
    pub length: u32,
}

impl OptionHead {
    /// Bytes of it.
    pub const BYTES: usize = 16;

    /// Decodes it.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<OptionHead, Malformed> {
        let mut fields = Fields(bytes);
        let magic = fields.u64();
        if magic != OPTION_MAGIC {
            return Err(Malformed::Magic { what: "an option", found: magic });
        }
        let (option, length) = (fields.u32(), fields.u32());
        match length {
            0..=MAX_OPTION_BYTES => Ok(OptionHead { option, length }),
            longer => Err(Malformed::OptionTooLong(longer)),
        }
    }
}

/// The data of `INFO` and `GO`: an export's name, and what is to be told of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportQuery<'a> {
    /// The export.
    pub name: &'a [u8],
    /// Numbers of [`info`], and others.
    pub wanted: Vec<u16>,
}

impl ExportQuery<'_> {
    /// Decodes it; none if its lengths do not fit each other.
    pub fn decode(data: &[u8]) -> Option<ExportQuery<'_>> {
        let (name, rest) = split_counted(data)?;
        let (count, rest) = rest.split_first_chunk::<2>()?;
        let (numbers, odd) = rest.as_chunks::<2>();
        let is_all = odd.is_empty() && numbers.len() == usize::from(u16::from_be_bytes(*count));
        let wanted = numbers.iter().map(|number| u16::from_be_bytes(*number)).collect();
        is_all.then_some(ExportQuery { name, wanted })
    }
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`: an export's name, and which contexts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextQuery<'a> {
    /// The export.
    pub name: &'a [u8],
    /// Names of contexts, or of their name spaces.
    pub queries: Vec<&'a [u8]>,
}

impl ContextQuery<'_> {
    /// Decodes it; none if its lengths do not fit each other.
    pub fn decode(data: &[u8]) -> Option<ContextQuery<'_>> {
        let (name, rest) = split_counted(data)?;
        let (count, mut rest) = rest.split_first_chunk::<4>()?;
        let mut queries = Vec::new();
        for _ in 0..u32::from_be_bytes(*count) {
            let (query, further) = split_counted(rest)?;
            queries.push(query);
            rest = further;
        }
        rest.is_empty().then_some(ContextQuery { name, queries })
    }

    /// Whether a client that lists contexts wants this one: it names none and means all, or the
    /// name space, or this one.
    pub fn lists_allocation(&self) -> bool {
        let namespace = allocation::NAMESPACE.as_bytes();
        self.queries.is_empty() || self.queries.contains(&namespace) || self.selects_allocation()
    }

    /// Whether a client that chooses contexts chooses this one: by its name only.
    pub fn selects_allocation(&self) -> bool {
        self.queries.contains(&allocation::NAME.as_bytes())
    }
}

/// Takes bytes off the front that are preceded by their number.
fn split_counted(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = data.split_first_chunk::<4>()?;
    rest.split_at_checked(u32::from_be_bytes(*length) as usize)
}

/// Takes integers off the front of a message whose length was checked.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (first, rest) = self.0.split_first_chunk().expect("the message is as long as it is");
        self.0 = rest;
        *first
    }

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take())
    }
}

/// The answer to an option.
pub fn option_reply(option: u32, answer: u32, data: &[u8]) -> Vec<u8> {
    let mut reply = Vec::with_capacity(20 + data.len());
    reply.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    reply.extend_from_slice(&option.to_be_bytes());
    reply.extend_from_slice(&answer.to_be_bytes());
    reply.extend_from_slice(&(data.len() as u32).to_be_bytes());
    reply.extend_from_slice(data);
    reply
}

/// A simple reply; what was read follows it.
pub fn simple_reply(cookie: u64, error: u32) -> [u8; 16] {
    let mut reply = [0; 16];
    reply[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    reply[4..8].copy_from_slice(&error.to_be_bytes());
    reply[8..].copy_from_slice(&cookie.to_be_bytes());
    reply
}

/// The head of the only part of a structured reply; `length` bytes follow it.
pub fn only_chunk(cookie: u64, kind: u16, length: u32) -> [u8; 20] {
    let mut head = [0; 20];
    head[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
    head[4..6].copy_from_slice(&chunk::DONE.to_be_bytes());
    head[6..8].copy_from_slice(&kind.to_be_bytes());
    head[8..16].copy_from_slice(&cookie.to_be_bytes());
    head[16..].copy_from_slice(&length.to_be_bytes());
    head
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(flags: u16, command: u16, cookie: u64, offset: u64, length: u32) -> [u8; 28] {
        let mut bytes = [0; 28];
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&command.to_be_bytes());
        bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&offset.to_be_bytes());
        bytes[24..].copy_from_slice(&length.to_be_bytes());
        bytes
    }

    #[test]
    fn the_numbers_are_those_of_the_specification() {
        assert_eq!(GREETING, 0x4e42_444d_4147_4943);
        assert_eq!(OPTION_MAGIC, 0x4948_4156_454f_5054);
        assert_eq!(simple_reply(7, 5)[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 5]);
        let hole = only_chunk(7, chunk::OFFSET_HOLE, 12);
        assert_eq!(hole[..8], [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 2]);
        let reply = option_reply(option::GO, answer::ERR_UNKNOWN, b"no");
        assert_eq!(reply[8..], [0, 0, 0, 7, 0x80, 0, 0, 6, 0, 0, 0, 2, b'n', b'o']);
    }

    proptest! {
        #[test]
        fn requests_are_what_was_sent(
            flags: u16, command in 0u16..9, cookie: u64, offset: u64, length: u32, size: u64,
            structured: bool, allocation: bool, read_only: bool,
        ) {
            let bytes = request(flags, command, cookie, offset, length);
            let decoded = match Request::decode(&bytes) {
                Ok(decoded) => decoded,
                Err(error) => {
                    prop_assert_eq!((command, error), (1, Malformed::WriteTooLong(length)));
                    return Ok(());
                }
            };
            let expected = match command {
                0 => Command::Read,
                1 => Command::Write,
                2 => Command::Disconnect,
                3 => Command::Flush,
                4 => Command::Trim,
                6 => Command::WriteZeroes,
                7 => Command::BlockStatus,
                other => Command::Unknown(other),
            };
            let sent = Request { flags, command: expected, cookie, offset, length };
            prop_assert_eq!(decoded, sent);
            let has_range = !matches!(
                expected,
                Command::Flush | Command::Disconnect | Command::Unknown(_)
            );
            let session = Session { structured, allocation, read_only };
            if decoded.check(size, session).is_ok() && has_range {
                prop_assert!(length > 0 && offset.checked_add(length.into()).unwrap() <= size);
                prop_assert!(flags & !15 == 0);
                let changes_nothing = matches!(expected, Command::Read | Command::BlockStatus);
                prop_assert!(!read_only || changes_nothing);
                prop_assert!(allocation || expected != Command::BlockStatus);
                prop_assert!(length <= MAX_PAYLOAD || !matches!(expected, Command::Read));
            }
        }

        #[test]
        fn noise_is_refused_and_nothing_panics(
            bytes: [u8; 28], head: [u8; 16], data in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            if bytes[..4] != REQUEST_MAGIC.to_be_bytes() {
                prop_assert!(Request::decode(&bytes).is_err());
            }
            if head[..8] != OPTION_MAGIC.to_be_bytes() {
                prop_assert!(OptionHead::decode(&head).is_err());
            }
            if let Some(query) = ExportQuery::decode(&data) {
                prop_assert_eq!(4 + query.name.len() + 2 + 2 * query.wanted.len(), data.len());
            }
            if let Some(query) = ContextQuery::decode(&data) {
                let queries: usize = query.queries.iter().map(|query| 4 + query.len()).sum();
                prop_assert_eq!(4 + query.name.len() + 4 + queries, data.len());
            }
        }

        #[test]
        fn option_heads_are_bounded(option: u32, length: u32) {
            let mut head = [0; 16];
            head[..8].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
            head[8..12].copy_from_slice(&option.to_be_bytes());
            head[12..].copy_from_slice(&length.to_be_bytes());
            let decoded = OptionHead::decode(&head);
            prop_assert_eq!(decoded.is_ok(), length <= MAX_OPTION_BYTES);
        }

        #[test]
        fn queries_are_what_was_sent(
            name in prop::collection::vec(any::<u8>(), 0..40),
            wanted in prop::collection::vec(any::<u16>(), 0..9),
        ) {
            let mut data = (name.len() as u32).to_be_bytes().to_vec();
            data.extend_from_slice(&name);
            data.extend_from_slice(&(wanted.len() as u16).to_be_bytes());
            data.extend(wanted.iter().flat_map(|number| number.to_be_bytes()));
            let query = ExportQuery { name: &name, wanted };
            prop_assert_eq!(ExportQuery::decode(&data), Some(query));
            prop_assert_eq!(ExportQuery::decode(&data[..data.len() - 1]), None);
        }

        #[test]
        fn questions_about_contexts_are_what_was_sent(
            name in prop::collection::vec(any::<u8>(), 0..40),
            queries in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..6),
        ) {
            let counted = |bytes: &[u8]| [&(bytes.len() as u32).to_be_bytes(), bytes].concat();
            let mut data = counted(&name);
            data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
            data.extend(queries.iter().flat_map(|query| counted(query)));
            let queries = queries.iter().map(Vec::as_slice).collect();
            let query = ContextQuery { name: &name, queries };
            prop_assert_eq!(ContextQuery::decode(&data), Some(query));
            prop_assert_eq!(ContextQuery::decode(&data[..data.len() - 1]), None);
        }
    }
}
