//! Admits clients to a volume: any number of readers, or one writer.
//!
//! A file system that two clients mount, one of which writes, soon breaks, and nothing reports it.
//! So a client that conflicts with attached clients is refused, with the name of one of them.
//! A volume whose clients coordinate among themselves is created for several writers.
//!
//! A node that reads with a lease ([`crate::readers`]) counts as a reader while the lease lasts.
//!
//! A client is a process of this host, a host on a network, or a certificate's name at a host.
//! It may have several connections.

use crate::readers::{Holder, Leases, MAX_READERS, now};
use crate::state::State;
use hecaton_memory::random_u64;
use rustix::net::getpeername;
use rustix::net::sockopt::socket_peercred;
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Wait for blocking clients to leave. A client may have gone just now, and not be noticed yet.
const PATIENCE: Duration = Duration::from_secs(1);

/// Access of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Read only.
    Reader,
    /// Read and write.
    Writer,
}

/// A client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Client {
    /// A process of this host.
    Process {
        /// Process id.
        pid: i32,
        /// Command name.
        command: String,
    },
    /// A client that has shown a certificate.
    Certified {
        /// Name in the certificate.
        name: String,
        /// Address of the client, over a network.
        host: Option<IpAddr>,
    },
    /// Another host, or this one by its address.
    Host(IpAddr),
    /// Another node, which reads with a lease.
    Node(String),
    /// This host's kernel or a machine, for as long as the volume is exported to it.
    Export,
    /// A client that cannot be identified. It is the same as no other client.
    Unknown,
}

/// Reason why a client cannot attach.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Held {
    /// A writer is attached.
    #[error("{0} is attached as the writer: a volume has one, and no readers beside it")]
    ByWriter(Client),
    /// A reader is attached, or a node has a lease.
    #[error("{0} is attached as a reader: a volume has no writer beside readers")]
    ByReader(Client),
    /// For this long, unknown nodes may still read that an earlier process has let read.
    #[error(
        "its process was started again, and nodes that the one before has let read may do so for another {} s: a \
         volume has no writer beside readers", .0.as_secs() + 1
    )]
    ByForgotten(Duration),
    /// This node has no right to read the volume now, for this reason.
    #[error("it cannot be read here now: {0}")]
    NotHeld(String),
    /// The named node owns the volume and writes it; this node only reads it.
    #[error("node `{0}` has it: it is read here, and written there")]
    Elsewhere(String),
}

/// Clients and reading nodes of a volume.
#[derive(Debug, Default)]
pub(crate) struct Attachments {
    table: Mutex<Table>,
    left: Condvar,
    /// The clients coordinate their writes among themselves.
    multi_writer: bool,
}

#[derive(Debug, Default)]
struct Table {
    last: u64,
    attached: BTreeMap<u64, (Client, Role)>,
    leases: Leases,
    /// Nodes may have leases.
    is_shared: bool,
    /// Drawn anew before each writer is admitted, and whenever sharing begins.
    edition: u64,
}

/// A client's right to the volume, until this is dropped.
#[derive(Debug)]
pub struct Attachment {
    attachments: Arc<Attachments>,
    number: u64,
}

impl Client {
    /// Client at the other end of a socket.
    pub fn of_socket(socket: impl AsFd) -> Client {
        if let Ok(Some(address)) = getpeername(&socket)
            && let Ok(address) = SocketAddr::try_from(address)
        {
            return Client::Host(address.ip());
        }
        // A process of another PID namespace has no process id here.
        match socket_peercred(&socket).map(|peer| peer.pid.as_raw_pid()) {
            Ok(pid @ 1..) => {
                let command = std::fs::read_to_string(format!("/proc/{pid}/comm"));
                Client::Process { pid, command: command.unwrap_or_default().trim_end().to_owned() }
            }
            _ => Client::Unknown,
        }
    }

    /// This client, under the name in its certificate.
    pub(crate) fn certified(self, name: &str) -> Client {
        let host = match self {
            Client::Host(host) => Some(host),
            _ => None,
        };
        Client::Certified { name: name.to_owned(), host }
    }

    fn is_same(&self, other: &Client) -> bool {
        match (self, other) {
            (Client::Process { pid, .. }, Client::Process { pid: other, .. }) => pid == other,
            (Client::Host(host), Client::Host(other)) => host == other,
            (Client::Certified { .. }, Client::Certified { .. }) => self == other,
            _ => false,
        }
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Client::Process { pid, command } if command.is_empty() => write!(f, "process {pid}"),
            Client::Process { pid, command } => write!(f, "process {pid} ({command})"),
            Client::Certified { name, host: None } => write!(f, "client `{name}`"),
            Client::Certified { name, host: Some(host) } => write!(f, "client `{name}` at {host}"),
            Client::Host(host) => write!(f, "a client at {host}"),
            Client::Node(node) => write!(f, "node `{node}`"),
            Client::Export => f.write_str("an export other than NBD"),
            Client::Unknown => f.write_str("a client of another name space"),
        }
    }
}

impl Attachments {
    #[cfg(test)]
    pub(crate) fn new(multi_writer: bool) -> Arc<Attachments> {
        Arc::new(Attachments { multi_writer, ..Attachments::default() })
    }

    /// Attachments of a process that continues with the tables of `state`.
    pub(crate) fn resumed(multi_writer: bool, state: &State) -> Arc<Attachments> {
        let leases = match state.is_leased() {
            true => Leases::after_another(now()),
            false => Leases::default(),
        };
        let table = Table { leases, edition: state.edition(), ..Table::default() };
        Arc::new(Attachments { table: Mutex::new(table), multi_writer, ..Attachments::default() })
    }

    /// Admits a client. Refuses it if a client that blocks it does not leave within `PATIENCE`.
    pub(crate) fn attach(self: &Arc<Self>, client: Client, role: Role) -> Result<Attachment, Held> {
        let is_barred = |table: &mut Table| self.bars(table, &client, role).is_some();
        let (mut table, _) = self
            .left
            .wait_timeout_while(self.table(), PATIENCE, is_barred)
            .expect("no thread panics with the attachments");
        if let Some(held) = self.bars(&mut table, &client, role) {
            return Err(held);
        }
        if role == Role::Writer {
            table.edition = draw_edition();
        }
        table.last += 1;
        let number = table.last;
        table.attached.insert(number, (client, role));
        Ok(Attachment { attachments: Arc::clone(self), number })
    }

    /// Client that is attached as a writer, if any.
    pub(crate) fn writer(&self) -> Option<Client> {
        let table = self.table();
        let mut writers = table.attached.values().filter(|(_, role)| *role == Role::Writer);
        writers.next().map(|(client, _)| client.clone())
    }

    /// An attached client or a reading node, if any.
    pub(crate) fn anybody(&self) -> Option<Client> {
        let mut table = self.table();
        let client = table.attached.values().next().map(|(client, _)| client.clone());
        client.or_else(|| table.leases.nodes(now()).into_iter().next().map(Client::Node))
    }

    /// Edition of the contents that other nodes may read.
    pub(crate) fn edition(&self) -> u64 {
        self.table().edition
    }

    /// Lets nodes read. With `is_new`, a new edition invalidates tables that nodes had before.
    pub(crate) fn share(&self, is_new: bool) {
        let mut table = self.table();
        table.is_shared = true;
        if is_new || table.edition == 0 {
            table.edition = draw_edition();
        }
    }

    /// Grants no more leases. Without `force`, fails while nodes have leases, with their names.
    pub(crate) fn unshare(&self, force: bool) -> Result<(), Vec<String>> {
        let mut table = self.table();
        match table.leases.nodes(now()) {
            nodes if !nodes.is_empty() && !force => Err(nodes),
            _ => {
                table.is_shared = false;
                Ok(())
            }
        }
    }

    /// Grants or renews a lease. Returns the edition, and whether the node had no lease.
    /// `state` has both before the node is told.
    pub(crate) fn lease(
        &self,
        session: u64,
        node: &str,
        state: &State,
    ) -> Result<(u64, bool), String> {
        let mut table = self.table();
        if !table.is_shared {
            return Err("it is not shared any more".to_owned());
        }
        let writer = table.attached.values().find(|(_, role)| *role == Role::Writer);
        if let Some((writer, _)) = writer {
            return Err(Held::ByWriter(writer.clone()).to_string());
        }
        let granted = table.leases.grant(session, node, now());
        let is_new =
            granted.map_err(|_| format!("{MAX_READERS} nodes read it, and no more may"))?;
        state.set_edition(table.edition);
        state.set_leased(true);
        Ok((table.edition, is_new))
    }

    /// Ends a node's lease.
    pub(crate) fn leave(&self, session: u64, state: &State) {
        let mut table = self.table();
        table.leases.leave(session);
        if table.leases.holder(now()).is_none() {
            state.set_leased(false);
        }
        drop(table);
        self.left.notify_all();
    }

    /// Whether a node may still read. If none may, `state` says so from then on.
    pub(crate) fn is_leased(&self, state: &State) -> bool {
        let mut table = self.table();
        let is_leased = table.leases.holder(now()).is_some();
        if !is_leased {
            state.set_leased(false);
        }
        is_leased
    }

    /// Nodes with leases.
    pub(crate) fn reading_nodes(&self) -> Vec<String> {
        self.table().leases.nodes(now())
    }

    fn bars(&self, table: &mut Table, client: &Client, role: Role) -> Option<Held> {
        if role == Role::Writer {
            match table.leases.holder(now()) {
                Some(Holder::Node(node)) => return Some(Held::ByReader(Client::Node(node))),
                Some(Holder::Forgotten(left)) => return Some(Held::ByForgotten(left)),
                None => {}
            }
        }
        let is_in_the_way = |(other, has): &&(Client, Role)| {
            let both_read = role == Role::Reader && *has == Role::Reader;
            !self.multi_writer && !both_read && !client.is_same(other)
        };
        let (holder, has) = table.attached.values().find(is_in_the_way)?.clone();
        Some(match has {
            Role::Writer => Held::ByWriter(holder),
            Role::Reader => Held::ByReader(holder),
        })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no thread panics with the attachments")
    }
}

/// Never 0, which stands for no edition.
fn draw_edition() -> u64 {
    random_u64().max(1)
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.attachments.table().attached.remove(&self.number);
        self.attachments.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;
    use std::os::unix::net::UnixStream;

    fn process(pid: i32) -> Client {
        Client::Process { pid, command: "qemu".into() }
    }

    #[test]
    fn many_read_or_one_writes() {
        let attachments = Attachments::new(false);
        let attach = |client: &Client, role| attachments.attach(client.clone(), role);
        let readers = [1, 2, 2].map(|pid| attach(&process(pid), Role::Reader).unwrap());
        let refused = attach(&process(3), Role::Writer).unwrap_err();
        assert!(refused.to_string().contains("process 1 (qemu)"), "{refused}");
        assert_eq!(attachments.writer(), None);
        drop(readers);
        // A client has as many connections as it likes.
        let writer = [(); 3].map(|()| attach(&process(3), Role::Writer).unwrap());
        let here = Client::Host(Ipv4Addr::LOCALHOST.into());
        for (client, role) in [(&here, Role::Writer), (&process(1), Role::Reader)] {
            assert_eq!(attach(client, role).unwrap_err(), Held::ByWriter(process(3)));
        }
        assert_eq!(attachments.writer(), Some(process(3)));
        drop(writer);
        let _other = attach(&Client::Unknown, Role::Writer).unwrap();
        assert!(attach(&Client::Unknown, Role::Writer).is_err(), "it may be another");
    }

    #[test]
    fn nodes_read_or_one_writes() {
        let state = State::create(1).unwrap();
        let attachments = Attachments::resumed(false, &state);
        assert!(attachments.lease(1, "b", &state).unwrap_err().contains("not shared"));
        attachments.share(true);
        let (edition, is_new) = attachments.lease(1, "b", &state).unwrap();
        assert!(is_new && state.is_leased() && state.edition() == edition);
        assert_eq!(attachments.lease(1, "b", &state), Ok((edition, false)));
        let _reads = attachments.attach(process(1), Role::Reader).unwrap();
        let refused = attachments.attach(process(1), Role::Writer).unwrap_err();
        assert_eq!(refused, Held::ByReader(Client::Node("b".into())));
        assert_eq!(attachments.unshare(false), Err(vec!["b".to_owned()]));
        // A successor continues, which knows of no lease.
        let next = Attachments::resumed(false, &state);
        next.share(false);
        let refused = next.attach(process(1), Role::Writer).unwrap_err();
        assert!(matches!(refused, Held::ByForgotten(_)), "{refused}");
        assert_eq!(next.lease(1, "b", &state), Ok((edition, true)), "and what b has is good");

        attachments.leave(1, &state);
        assert!(!state.is_leased());
        let writer = attachments.attach(process(1), Role::Writer).unwrap();
        let refused = attachments.lease(1, "b", &state).unwrap_err();
        assert!(refused.starts_with("process 1 (qemu) is attached as the writer"), "{refused}");
        drop(writer);
        assert_ne!(attachments.lease(1, "b", &state).unwrap().0, edition);
        attachments.unshare(true).unwrap();
        assert!(attachments.is_leased(&state));
        assert!(attachments.lease(1, "b", &state).is_err(), "not even to go on");
    }

    #[test]
    fn one_that_is_going_is_waited_for() {
        let attachments = Attachments::new(false);
        let first = attachments.attach(process(1), Role::Writer).unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| attachments.attach(process(2), Role::Writer).is_ok());
            drop(first);
            assert!(second.join().unwrap());
        });
    }

    #[test]
    fn those_that_take_care_of_each_other_all_write() {
        let attachments = Attachments::new(true);
        let writers = [1, 2].map(|pid| attachments.attach(process(pid), Role::Writer));
        assert!(writers.iter().all(Result::is_ok));
    }

    #[test]
    fn whom_a_certificate_names_is_one_client_at_one_host() {
        let attachments = Attachments::new(false);
        let at = |host: &str| Client::Host(host.parse().unwrap());
        let alice = at("192.0.2.1").certified("alice");
        let _writes = attachments.attach(alice.clone(), Role::Writer).unwrap();
        let _again = attachments.attach(alice, Role::Writer).unwrap();
        for other in [at("192.0.2.1").certified("bob"), at("192.0.2.2").certified("alice")] {
            let held = attachments.attach(other, Role::Writer).unwrap_err().to_string();
            assert!(held.starts_with("client `alice` at 192.0.2.1 is attached"), "{held}");
        }
        let local = process(7).certified("alice").to_string();
        assert_eq!(local, "client `alice`");
    }

    #[test]
    fn a_client_is_known_by_its_socket() {
        let (socket, _other) = UnixStream::pair().unwrap();
        let client = Client::of_socket(&socket);
        assert!(client.to_string().contains(&std::process::id().to_string()), "{client}");
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(Client::of_socket(&socket), Client::Host(Ipv4Addr::LOCALHOST.into()));
    }
}
