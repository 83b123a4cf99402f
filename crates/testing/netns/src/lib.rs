//! Hosts for tests and benches: network namespaces on a bridge, each with one address, which can be
//! cut off from the others, and the commands that make a Hecaton cluster of them.
//!
//! Namespaces have no names here. A descriptor of this process and the processes inside keep each
//! one, so a killed process leaves nothing behind. The bridge is in a namespace of its own, too:
//! the machine's own network is neither used nor seen.
//!
//! A host that is cut off is told nothing, and neither are its peers: packets vanish in the bridge,
//! as with a switch that fails. Neither netem nor netfilter is needed, which kernels for containers
//! often lack.

pub mod cluster;
mod namespace;

pub use namespace::Namespace;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Most hosts of a network.
pub const MAX_HOSTS: usize = 64;

/// How long a new link may take until it carries something.
const LINK_PATIENCE: Duration = Duration::from_secs(10);

/// Burst of a limited link: some of the largest packets that the kernel makes.
const BURST_BYTES: u32 = 1 << 20;

/// Longest queue of a limited link: a few milliseconds, as in a switch.
const LONGEST_QUEUE_MS: u32 = 5;

/// A hardware address that no host has.
const NOBODY: &str = "02:00:00:00:ff:ff";

/// Why there are no hosts, or one cannot be cut off.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The kernel refuses.
    #[error("this process may not make network namespaces, which takes CAP_SYS_ADMIN")]
    NotPermitted(#[source] io::Error),
    /// A tool is missing.
    #[error("cannot run `{tool}` (Debian package {package})")]
    Missing {
        /// Its name.
        tool: &'static str,
        /// Debian package that contains the tool.
        package: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
    /// A tool refuses.
    #[error("`{tool}` fails: {complaint}")]
    Failed {
        /// Command that failed.
        tool: &'static str,
        /// Its own words.
        complaint: String,
    },
    /// A link carries nothing.
    #[error("host {0} does not reach the first one, {LINK_PATIENCE:?} after its link was made")]
    NoLink(Ipv4Addr),
    /// More hosts than can be.
    #[error("{0} hosts are more than the {MAX_HOSTS} that a network has")]
    TooMany(usize),
}

/// Which packets of a host vanish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// All of them.
    Off,
    /// Those that others send to it. Its own packets arrive.
    Deaf,
    /// Those that it sends. Packets from others arrive.
    Mute,
}

/// Some hosts that reach each other and nobody else.
#[derive(Debug)]
pub struct Network {
    switch: Namespace,
    hosts: Vec<Host>,
}

/// One of them.
#[derive(Debug)]
pub struct Host {
    index: u8,
    namespace: Namespace,
}

impl Network {
    /// So many hosts, connected.
    pub fn new(hosts: usize) -> Result<Network, NetError> {
        let count = u8::try_from(hosts).ok().filter(|count| usize::from(*count) <= MAX_HOSTS);
        let count = count.ok_or(NetError::TooMany(hosts))?;
        let switch = Namespace::new()?;
        // Where frames go that are to reach nobody: a cable whose other end is listened to by none.
        switch.ip("link add br0 type bridge\nlink set br0 up\n")?;
        switch.ip("link add hole type veth peer name void\nlink set void up\n")?;
        switch.ip("link set hole master br0 up\n")?;
        let hosts = (0..count).map(|index| Host::plug_into(&switch, index));
        let hosts = hosts.collect::<Result<_, _>>()?;
        let network = Network { switch, hosts };
        for host in network.hosts.iter().skip(1) {
            host.wait_for(&network.hosts[0])?;
        }
        Ok(network)
    }

    /// The host, counted from 0.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn host(&self, index: usize) -> &Host {
        &self.hosts[index]
    }

    /// From here on no host sends or receives more than so many gigabits a second, as with network
    /// cards of that speed: what is too much waits, for some milliseconds, and is lost if it is
    /// more than that.
    pub fn limit(&self, gigabits_per_s: u16) -> Result<(), NetError> {
        let limit = |device: &str| {
            format!(
                "qdisc replace dev {device} root tbf rate {gigabits_per_s}gbit burst {BURST_BYTES} \
                 latency {LONGEST_QUEUE_MS}ms\n"
            )
        };
        for host in &self.hosts {
            host.namespace.tc(&limit("eth0"))?;
            self.switch.tc(&limit(&host.port()))?;
        }
        Ok(())
    }

    /// Cuts a host off, until the outage is healed or dropped.
    ///
    /// # Panics
    /// If there is no such host.
    pub fn cut(&self, index: usize, cut: Cut) -> Result<Outage<'_>, NetError> {
        let outage = Outage { network: self, host: &self.hosts[index], cut, is_over: false };
        outage.begin()?;
        Ok(outage)
    }
}

impl Host {
    fn plug_into(switch: &Namespace, index: u8) -> Result<Host, NetError> {
        let host = Host { index, namespace: Namespace::new()? };
        let (port, hardware, address) = (host.port(), host.hardware_address(), host.address());
        let inside = host.namespace.path();
        switch.ip(&format!(
            "link add {port} type veth peer name eth0 address {hardware} netns {}\n\
             link set {port} master br0 up\n",
            inside.display()
        ))?;
        host.namespace.ip(&format!(
            "link set lo up\naddress add {address}/24 dev eth0\nlink set eth0 up\n"
        ))?;
        Ok(host)
    }

    /// Its name, by its index.
    pub fn name(&self) -> String {
        format!("host-{}", self.index)
    }

    /// Its address, by which the other hosts reach it.
    pub fn address(&self) -> Ipv4Addr {
        // TEST-NET-1 (RFC 5737): nobody's, wherever this is run.
        Ipv4Addr::new(192, 0, 2, 1 + self.index)
    }

    /// Where its processes and sockets live.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The switch's end of its cable.
    fn port(&self) -> String {
        format!("port{}", self.index)
    }

    fn hardware_address(&self) -> String {
        format!("02:00:00:00:00:{:02x}", self.index)
    }

    fn wait_for(&self, other: &Host) -> Result<(), NetError> {
        let began = Instant::now();
        let nobody_listens = SocketAddr::from((other.address(), 9));
        loop {
            let tried = self
                .namespace
                .enter(|| TcpStream::connect_timeout(&nobody_listens, Duration::from_millis(200)));
            match tried {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return Ok(()),
                _ if began.elapsed() < LINK_PATIENCE => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                _ => return Err(NetError::NoLink(self.address())),
            }
        }
    }
}

/// A host that is cut off.
#[derive(Debug)]
#[must_use = "it ends when this is dropped"]
pub struct Outage<'a> {
    network: &'a Network,
    host: &'a Host,
    cut: Cut,
    is_over: bool,
}

impl Outage<'_> {
    fn begin(&self) -> Result<(), NetError> {
        match self.cut {
            Cut::Off => self.set_port("0"),
            // Sticky, or the host's next frame would teach the switch better.
            Cut::Deaf => self.host_is_at_the_hole("replace", " master sticky static"),
            // By addresses, because a bridge can keep a port from hearing but not from being heard.
            Cut::Mute => self.neighbours("replace", &format!(" lladdr {NOBODY} nud permanent")),
        }
    }

    /// Ends it.
    pub fn heal(mut self) -> Result<(), NetError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), NetError> {
        self.is_over = true;
        match self.cut {
            Cut::Off => self.set_port("3"),
            Cut::Deaf => self.host_is_at_the_hole("del", " master"),
            Cut::Mute => self.neighbours("del", ""),
        }
    }

    /// 0 is disabled, 3 forwarding, as `bridge(8)` counts them. (`ip link` takes a port's state,
    /// too, and does nothing about it.)
    fn set_port(&self, state: &str) -> Result<(), NetError> {
        let port = self.host.port();
        self.network.switch.bridge(&format!("link set dev {port} state {state}\n"))
    }

    fn host_is_at_the_hole(&self, what: &str, how: &str) -> Result<(), NetError> {
        let hardware = self.host.hardware_address();
        self.network.switch.bridge(&format!("fdb {what} {hardware} dev hole{how}\n"))
    }

    fn neighbours(&self, what: &str, how: &str) -> Result<(), NetError> {
        let others = self.network.hosts.iter().filter(|host| host.index != self.host.index);
        let lines =
            others.map(|host| format!("neighbour {what} {} dev eth0{how}\n", host.address()));
        self.host.namespace.ip(&lines.collect::<String>())
    }
}

impl Drop for Outage<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            // Left by an error or a panic, which says more than one of the tools could.
            let _ = self.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::net::{TcpListener, UdpSocket};

    const SHORT: Duration = Duration::from_millis(50);

    /// A socket of each of two hosts.
    fn sockets(network: &Network) -> [UdpSocket; 2] {
        [0, 1].map(|index| {
            let host = network.host(index);
            let bound = host.namespace().enter(|| UdpSocket::bind((host.address(), 0)));
            let socket = bound.expect("a free port");
            socket.set_read_timeout(Some(SHORT)).expect("a timeout");
            socket
        })
    }

    /// Whether what one sends reaches the other. Repeated, because a neighbour is asked for first.
    fn reaches(from: &UdpSocket, to: &UdpSocket) -> bool {
        let address = to.local_addr().expect("bound");
        let mut buffer = [0; 16];
        (0..10)
            .any(|_| from.send_to(b"hello", address).is_ok() && to.recv_from(&mut buffer).is_ok())
    }

    #[test]
    fn a_host_is_cut_off_as_asked_and_healed() {
        let network = match Network::new(3) {
            Ok(network) => network,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        let [first, second] = sockets(&network);
        let ways = || (reaches(&first, &second), reaches(&second, &first));
        assert_eq!(ways(), (true, true));
        for (cut, expected) in
            [(Cut::Off, (false, false)), (Cut::Deaf, (false, true)), (Cut::Mute, (true, false))]
        {
            let outage = network.cut(1, cut).expect("cut off");
            assert_eq!(ways(), expected, "{cut:?}");
            outage.heal().expect("healed");
            assert_eq!(ways(), (true, true), "after {cut:?}");
        }
        drop(network.cut(1, Cut::Off).expect("cut off"));
        assert_eq!(ways(), (true, true), "an outage ends when it is dropped");
    }

    #[test]
    fn a_limited_network_carries_no_more() {
        const BYTES: usize = 60_000_000;
        let network = match Network::new(2) {
            Ok(network) => network,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        network.limit(1).expect("limited");
        let (from, to) = (network.host(0), network.host(1));
        let listener = to.namespace().enter(|| TcpListener::bind((to.address(), 0)));
        let listener = listener.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let began = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let stream = from.namespace().enter(|| TcpStream::connect(address));
                stream.expect("connected").write_all(&vec![1; BYTES]).expect("taken");
            });
            let (mut stream, _) = listener.accept().expect("accepted");
            let received = io::copy(&mut stream, &mut io::sink()).expect("received");
            assert_eq!(received, BYTES as u64);
        });
        // A second carries 125 MB. However slow the machine is, it is no faster than that.
        let least = (BYTES - 4 * BURST_BYTES as usize) as f64 / 125e6;
        assert!(began.elapsed().as_secs_f64() > least, "{:?}", began.elapsed());
    }

    #[test]
    fn too_many_hosts_are_refused() {
        assert!(matches!(Network::new(MAX_HOSTS + 1), Err(NetError::TooMany(_))));
    }
}
