//! The handshake: from the greeting to the choice of the export.

use super::wire::{
    ContextQuery, ExportQuery, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, GREETING, MAX_PAYLOAD,
    Malformed, OPTION_MAGIC, OptionHead, Session, allocation, answer, info, option, option_reply,
    transmission,
};
use crate::attach::Held;
use hecaton_memory::PAGE_SIZE;
use std::io::{self, Read, Write};

/// Most options of one client.
const MAX_OPTIONS: usize = 256;

/// The only export of a server. A client may choose it by its name, or by none.
#[derive(Clone, Debug)]
pub struct Export {
    /// Its name.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// Nothing may be written.
    pub read_only: bool,
}

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The client does not speak the protocol.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// Another one has the volume, and this one asks in the old way, which has no answer for that.
    #[error(transparent)]
    Held(#[from] Held),
    /// The connection ended, or the client took too long.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Options that a client may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gate {
    /// Anything; there is no TLS.
    Plain,
    /// TLS, and nothing before it.
    TlsFirst,
    /// Anything: TLS is spoken.
    Encrypted,
    /// Nothing; why, it is told. TLS is spoken.
    Shut(String),
}

/// How a handshake ends.
#[derive(Debug, PartialEq, Eq)]
pub enum Negotiated<A> {
    /// With the choice of the export, and what letting the client in gave.
    Chosen(Session, A),
    /// TLS is to come, and then the rest.
    StartTls,
    /// The client ends it, as one does that only asks.
    Left,
}

/// Refusal of all options before TLS.
const TLS_FIRST: &str = "this export takes TLS only, with a certificate of its cluster";

/// Greets a client, and returns the flags that it answers with.
pub fn greet(stream: &mut (impl Read + Write)) -> Result<u32, HandshakeError> {
    let mut greeting = [0; 18];
    greeting[..8].copy_from_slice(&GREETING.to_be_bytes());
    greeting[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
    greeting[16..].copy_from_slice(&(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
    stream.write_all(&greeting)?;
    let mut flags = [0; 4];
    stream.read_exact(&mut flags)?;
    let flags = u32::from_be_bytes(flags);
    if flags & !u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) != 0 {
        return Err(Malformed::ClientFlags(flags).into());
    }
    Ok(flags)
}

/// Negotiates options after the greeting, which the client has answered with `flags`. `attach`
/// admits the client that chooses the export; its result is returned with the session.
pub fn negotiate<A>(
    stream: &mut (impl Read + Write),
    flags: u32,
    gate: &Gate,
    export: &Export,
    mut attach: impl FnMut() -> Result<A, Held>,
) -> Result<Negotiated<A>, HandshakeError> {
    let mut session = Session { read_only: export.read_only, ..Session::default() };
    for _ in 0..MAX_OPTIONS {
        let mut head = [0; OptionHead::BYTES];
        stream.read_exact(&mut head)?;
        let OptionHead { option, length } = OptionHead::decode(&head)?;
        let mut data = vec![0; length as usize];
        stream.read_exact(&mut data)?;
        let mut reply = |kind, data: &[u8]| stream.write_all(&option_reply(option, kind, data));
        let refusal = match gate {
            Gate::Plain | Gate::Encrypted => None,
            Gate::TlsFirst => Some((answer::ERR_TLS_REQUIRED, TLS_FIRST)),
            Gate::Shut(why) => Some((answer::ERR_POLICY, why.as_str())),
        };
        match (option, refusal) {
            (option::ABORT, _) => {
                // The client may be gone already.
                let _ = reply(answer::ACK, &[]);
                return Ok(Negotiated::Left);
            }
            (option::START_TLS, _) if *gate != Gate::Plain => {
                if *gate == Gate::TlsFirst && data.is_empty() {
                    reply(answer::ACK, &[])?;
                    return Ok(Negotiated::StartTls);
                }
                reply(answer::ERR_INVALID, b"it has no data, and is asked for once")?;
                continue;
            }
            (option::EXPORT_NAME, Some((_, why))) => {
                return Err(Malformed::Refused(why.to_owned()).into());
            }
            (_, Some((kind, why))) => {
                reply(kind, why.as_bytes())?;
                continue;
            }
            (_, None) => {}
        }
        match option {
            option::EXPORT_NAME => {
                if !export.is_called(&data) {
                    let name = String::from_utf8_lossy(&data).into_owned();
                    return Err(Malformed::NoSuchExport(name).into());
                }
                let attached = attach()?;
                let mut chosen = export.size_and_flags(session).to_vec();
                if flags & u32::from(FLAG_NO_ZEROES) == 0 {
                    chosen.extend_from_slice(&[0; 124]);
                }
                stream.write_all(&chosen)?;
                return Ok(Negotiated::Chosen(session, attached));
            }
            option::LIST if data.is_empty() => {
                let mut name = (export.name.len() as u32).to_be_bytes().to_vec();
                name.extend_from_slice(export.name.as_bytes());
                reply(answer::SERVER, &name)?;
                reply(answer::ACK, &[])?;
            }
            option::INFO | option::GO => match ExportQuery::decode(&data) {
                Some(query) if export.is_called(query.name) => {
                    let attached = match (option == option::GO).then(&mut attach).transpose() {
                        Ok(attached) => attached,
                        Err(held) => {
                            reply(answer::ERR_POLICY, held.to_string().as_bytes())?;
                            continue;
                        }
                    };
                    for information in export.information(&query.wanted, session) {
                        reply(answer::INFO, &information)?;
                    }
                    reply(answer::ACK, &[])?;
                    if let Some(attached) = attached {
                        return Ok(Negotiated::Chosen(session, attached));
                    }
                }
                Some(_) => reply(answer::ERR_UNKNOWN, b"there is no such export")?,
                None => reply(answer::ERR_INVALID, b"the lengths do not fit")?,
            },
            option::STRUCTURED_REPLY if data.is_empty() && !session.structured => {
                session.structured = true;
                reply(answer::ACK, &[])?;
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                let is_choice = option == option::SET_META_CONTEXT;
                // A choice that fails leaves none, whatever was chosen before.
                session.allocation &= !is_choice;
                match ContextQuery::decode(&data) {
                    _ if !session.structured => {
                        reply(answer::ERR_INVALID, b"ask for structured replies first")?;
                    }
                    Some(query) if export.is_called(query.name) => {
                        let is_meant = match is_choice {
                            true => query.selects_allocation(),
                            false => query.lists_allocation(),
                        };
                        if is_meant {
                            let id = allocation::ID.to_be_bytes();
                            let context = [&id, allocation::NAME.as_bytes()].concat();
                            reply(answer::META_CONTEXT, &context)?;
                        }
                        session.allocation |= is_choice && is_meant;
                        reply(answer::ACK, &[])?;
                    }
                    Some(_) => reply(answer::ERR_UNKNOWN, b"there is no such export")?,
                    None => reply(answer::ERR_INVALID, b"the lengths do not fit")?,
                }
            }
            option::LIST | option::STRUCTURED_REPLY => {
                reply(answer::ERR_INVALID, b"the option has no data, and is given once")?;
            }
            _ => reply(answer::ERR_UNSUPPORTED, &[])?,
        }
    }
    Err(Malformed::TooManyOptions(MAX_OPTIONS).into())
}

impl Export {
    fn is_called(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }

    fn size_and_flags(&self, session: Session) -> [u8; 10] {
        let mut flags = transmission::HAS_FLAGS
            | transmission::SEND_FLUSH
            | transmission::SEND_FUA
            | transmission::SEND_TRIM
            | transmission::SEND_WRITE_ZEROES
            | transmission::CAN_MULTI_CONN;
        if session.structured {
            flags |= transmission::SEND_DF;
        }
        if session.read_only {
            flags |= transmission::READ_ONLY;
        }
        let mut bytes = [0; 10];
        bytes[..8].copy_from_slice(&self.size_bytes.to_be_bytes());
        bytes[8..].copy_from_slice(&flags.to_be_bytes());
        bytes
    }

    /// Information about the export: size, flags and block sizes always, the name if `wanted`.
    fn information(&self, wanted: &[u16], session: Session) -> Vec<Vec<u8>> {
        let of_kind = |kind: u16, data: &[u8]| [&kind.to_be_bytes(), data].concat();
        let mut sizes = Vec::new();
        for size in [1, PAGE_SIZE as u32, MAX_PAYLOAD] {
            sizes.extend_from_slice(&size.to_be_bytes());
        }
        let mut all = vec![
            of_kind(info::EXPORT, &self.size_and_flags(session)),
            of_kind(info::BLOCK_SIZE, &sizes),
        ];
        if wanted.contains(&info::NAME) {
            all.push(of_kind(info::NAME, self.name.as_bytes()));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::{self, Attachments, Role};
    use proptest::prelude::*;

    /// A client that has said everything beforehand.
    struct Client {
        said: io::Cursor<Vec<u8>>,
        heard: Vec<u8>,
    }

    impl Read for Client {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.said.read(buffer)
        }
    }

    impl Write for Client {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.heard.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn negotiated(said: Vec<u8>) -> (Result<Option<Session>, HandshakeError>, Vec<u8>) {
        let export = Export { name: "disk".into(), size_bytes: 1 << 30, read_only: false };
        let mut client = Client { said: io::Cursor::new(said), heard: Vec::new() };
        let result = negotiated_by(&mut client, &Gate::Plain, &export, || Ok(()));
        let session = result.map(|negotiated| match negotiated {
            Negotiated::Chosen(session, ()) => Some(session),
            Negotiated::Left => None,
            Negotiated::StartTls => panic!("there is none"),
        });
        (session, client.heard.split_off(18))
    }

    fn negotiated_by<A>(
        client: &mut Client,
        gate: &Gate,
        export: &Export,
        attach: impl FnMut() -> Result<A, Held>,
    ) -> Result<Negotiated<A>, HandshakeError> {
        let flags = greet(client)?;
        negotiate(client, flags, gate, export, attach)
    }

    fn saying(options: &[(u32, &[u8])]) -> Vec<u8> {
        let mut said = 3u32.to_be_bytes().to_vec();
        for (option, data) in options {
            said.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
            said.extend_from_slice(&option.to_be_bytes());
            said.extend_from_slice(&(data.len() as u32).to_be_bytes());
            said.extend_from_slice(data);
        }
        said
    }

    fn query(name: &str) -> Vec<u8> {
        [&(name.len() as u32).to_be_bytes(), name.as_bytes(), &[0, 1, 0, 1]].concat()
    }

    #[test]
    fn an_export_is_chosen_by_name_or_by_none() {
        for name in ["disk", ""] {
            let (session, heard) =
                negotiated(saying(&[(option::STRUCTURED_REPLY, b""), (option::GO, &query(name))]));
            assert_eq!(session.unwrap(), Some(Session { structured: true, ..Session::default() }));
            assert_eq!(heard[..20], option_reply(8, answer::ACK, &[])[..]);
            // Size and flags: all that is offered.
            assert_eq!(heard[40..52], [0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0x01, 0xed]);
            let (session, heard) = negotiated(saying(&[(option::EXPORT_NAME, name.as_bytes())]));
            assert_eq!(session.unwrap(), Some(Session::default()));
            assert_eq!(heard, [0, 0, 0, 0, 0x40, 0, 0, 0, 0x01, 0x6d]);
        }
    }

    fn context_query(name: &str, queries: &[&str]) -> Vec<u8> {
        let counted = |text: &str| [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat();
        let mut data = counted(name);
        data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
        data.extend(queries.iter().flat_map(|query| counted(query)));
        data
    }

    /// The kinds of the answers to options.
    fn kinds(mut heard: &[u8]) -> Vec<u32> {
        let mut kinds = Vec::new();
        while !heard.is_empty() {
            let field = |at: usize| u32::from_be_bytes(heard[at..at + 4].try_into().unwrap());
            kinds.push(field(12));
            heard = &heard[20 + field(16) as usize..];
        }
        kinds
    }

    #[test]
    fn who_may_not_have_it_is_told_who_has() {
        let attachments = Attachments::new(false);
        let process = |pid| attach::Client::Process { pid, command: "qemu".into() };
        let _held = attachments.attach(process(1), Role::Writer).unwrap();
        let export = Export { name: "disk".into(), size_bytes: 1 << 30, read_only: true };
        let refused = |option, data: &[u8]| {
            let said = io::Cursor::new(saying(&[(option, data), (option::ABORT, b"")]));
            let mut client = Client { said, heard: Vec::new() };
            let attach = || attachments.attach(process(2), Role::Reader);
            let result = negotiated_by(&mut client, &Gate::Plain, &export, attach);
            let result = result.map(|negotiated| matches!(negotiated, Negotiated::Left));
            (result, client.heard.split_off(18))
        };
        let (result, heard) = refused(option::GO, &query("disk"));
        assert!(result.unwrap(), "the client may go on");
        assert_eq!(kinds(&heard), [answer::ERR_POLICY, answer::ACK]);
        assert!(String::from_utf8_lossy(&heard).contains("process 1 (qemu)"));
        let (result, _) = refused(option::EXPORT_NAME, b"disk");
        assert!(matches!(result, Err(HandshakeError::Held(_))));
        // INFO needs no attachment, and its answer says that the export is read-only.
        let (_, heard) = refused(option::INFO, &query("disk"));
        assert_eq!(
            kinds(&heard),
            [answer::INFO, answer::INFO, answer::INFO, answer::ACK, answer::ACK]
        );
        assert_eq!(heard[30..32], [0x01, 0x6f]);
    }

    #[test]
    fn nothing_is_answered_before_tls_nor_to_who_may_not() {
        use answer::{ACK, ERR_INVALID, ERR_POLICY, ERR_TLS_REQUIRED, ERR_UNSUPPORTED};
        let export = Export { name: "disk".into(), size_bytes: 1 << 30, read_only: false };
        let negotiated = |gate: &Gate, options: &[(u32, &[u8])]| {
            let mut client = Client { said: io::Cursor::new(saying(options)), heard: Vec::new() };
            let result = negotiated_by(&mut client, gate, &export, || Ok(()));
            (result, client.heard.split_off(18))
        };
        let (go, contexts) = (query("disk"), context_query("disk", &["base:allocation"]));
        let all: [(u32, &[u8]); 7] = [
            (option::GO, &go),
            (option::INFO, &go),
            (option::LIST, b""),
            (option::STRUCTURED_REPLY, b""),
            (option::SET_META_CONTEXT, &contexts),
            (99, b""),
            (option::START_TLS, b"x"),
        ];
        let (result, heard) =
            negotiated(&Gate::TlsFirst, &[&all[..], &[(option::START_TLS, b"")]].concat());
        assert_eq!(result.unwrap(), Negotiated::StartTls);
        let mut expected = vec![ERR_TLS_REQUIRED; 6];
        expected.extend([ERR_INVALID, ACK]);
        assert_eq!(kinds(&heard), expected);

        let shut = Gate::Shut("no node".to_owned());
        let (result, heard) =
            negotiated(&shut, &[&all[..6], &[(option::ABORT, b"" as &[u8])]].concat());
        assert_eq!(result.unwrap(), Negotiated::Left);
        assert_eq!(kinds(&heard), [vec![ERR_POLICY; 6], vec![ACK]].concat());
        assert!(!heard.windows(4).any(|bytes| bytes == b"disk"), "not even a name");

        for gate in [Gate::TlsFirst, shut] {
            let (result, heard) = negotiated(&gate, &[(option::EXPORT_NAME, b"disk")]);
            assert!(matches!(result, Err(HandshakeError::Malformed(Malformed::Refused(_)))));
            assert!(heard.is_empty());
        }
        let again = [(option::START_TLS, b"" as &[u8]), (option::GO, &go)];
        let (result, heard) = negotiated(&Gate::Encrypted, &again);
        assert!(matches!(result, Ok(Negotiated::Chosen(_, ()))));
        assert_eq!(kinds(&heard)[0], ERR_INVALID);
        let (result, heard) = negotiated(&Gate::Plain, &again);
        assert!(matches!(result, Ok(Negotiated::Chosen(_, ()))));
        assert_eq!(kinds(&heard)[0], ERR_UNSUPPORTED);
    }

    #[test]
    fn contexts_are_listed_and_chosen() {
        use answer::{ACK, ERR_INVALID, ERR_UNKNOWN, META_CONTEXT};
        use option::{ABORT, LIST_META_CONTEXT, SET_META_CONTEXT, STRUCTURED_REPLY};
        let cases: &[(u32, Vec<u8>, &[u32])] = &[
            (SET_META_CONTEXT, context_query("disk", &["base:allocation"]), &[ERR_INVALID]),
            (STRUCTURED_REPLY, Vec::new(), &[ACK]),
            (LIST_META_CONTEXT, context_query("disk", &[]), &[META_CONTEXT, ACK]),
            (LIST_META_CONTEXT, context_query("", &["x:y", "base:"]), &[META_CONTEXT, ACK]),
            (LIST_META_CONTEXT, context_query("disk", &["base:other"]), &[ACK]),
            (SET_META_CONTEXT, context_query("disk", &["base:"]), &[ACK]),
            (SET_META_CONTEXT, context_query("disk", &[]), &[ACK]),
            (SET_META_CONTEXT, context_query("other", &["base:allocation"]), &[ERR_UNKNOWN]),
            (SET_META_CONTEXT, vec![0; 3], &[ERR_INVALID]),
            (SET_META_CONTEXT, vec![0; 9], &[ERR_INVALID]),
            (ABORT, Vec::new(), &[ACK]),
        ];
        let said: Vec<_> = cases.iter().map(|(option, data, _)| (*option, &data[..])).collect();
        let (_, heard) = negotiated(saying(&said));
        let expected: Vec<u32> = cases.iter().flat_map(|(_, _, kinds)| *kinds).copied().collect();
        assert_eq!(kinds(&heard), expected);
    }

    #[test]
    fn the_last_choice_of_contexts_is_what_counts() {
        let chosen = |last: &[&str]| {
            let first = context_query("", &["x:y", "base:allocation"]);
            let (session, _) = negotiated(saying(&[
                (option::STRUCTURED_REPLY, b""),
                (option::SET_META_CONTEXT, &first),
                (option::SET_META_CONTEXT, &context_query("disk", last)),
                (option::LIST_META_CONTEXT, &context_query("disk", &[])),
                (option::GO, &query("disk")),
            ]));
            session.unwrap().unwrap().allocation
        };
        assert!(chosen(&["base:allocation"]) && !chosen(&[]) && !chosen(&["base:"]));
    }

    #[test]
    fn what_cannot_be_is_answered_and_the_client_may_go_on() {
        let (session, heard) = negotiated(saying(&[
            (option::GO, &query("other")),
            (option::GO, b"x"),
            (option::INFO, &query("disk")),
            (option::LIST, b"x"),
            (5, b""),
            (option::ABORT, b""),
        ]));
        assert_eq!(session.unwrap(), None);
        use answer::{ACK, ERR_INVALID, ERR_UNKNOWN, ERR_UNSUPPORTED, INFO};
        let expected =
            [ERR_UNKNOWN, ERR_INVALID, INFO, INFO, INFO, ACK, ERR_INVALID, ERR_UNSUPPORTED, ACK];
        assert_eq!(kinds(&heard), expected);
    }

    #[test]
    fn what_is_no_client_ends() {
        let malformed = |said: Vec<u8>| match negotiated(said).0 {
            Err(HandshakeError::Malformed(malformed)) => malformed,
            other => panic!("{other:?}"),
        };
        assert_eq!(malformed(vec![0xff; 4]), Malformed::ClientFlags(u32::MAX));
        let unknown = malformed(saying(&[(option::EXPORT_NAME, b"other")]));
        assert_eq!(unknown, Malformed::NoSuchExport("other".into()));
        let endless = saying(&vec![(99, b"".as_slice()); MAX_OPTIONS]);
        assert_eq!(malformed(endless), Malformed::TooManyOptions(MAX_OPTIONS));
        let (cut, _) = negotiated(saying(&[])[..3].to_vec());
        assert!(matches!(cut, Err(HandshakeError::Io(_))));
    }

    proptest! {
        #[test]
        fn any_noise_ends_without_a_panic(
            noise in prop::collection::vec(any::<u8>(), 0..200),
            options in prop::collection::vec((0u32..12, prop::collection::vec(any::<u8>(), 0..30)), 0..6),
        ) {
            let borrowed: Vec<_> = options.iter().map(|(kind, data)| (*kind, data.as_slice())).collect();
            let mut said = saying(&borrowed);
            said.extend_from_slice(&noise);
            let _ = negotiated(said);
            let _ = negotiated(noise);
        }
    }
}
