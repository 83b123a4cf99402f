//! How a node is told to announce what it lends, and to whom it listens.

use crate::terminal::failure::usage;
use anyhow::Context as _;
use hecaton_node::announce::{Key, Network};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;

/// Arguments about announcements.
#[derive(clap::Args)]
pub(crate) struct AnnounceArgs {
    /// Tells the network each second what the node lends, and uses the donors of other nodes that
    /// do so, with a manager or without; of a multicast group or a broadcast address [GROUP:
    /// 239.255.72.69:7077]
    #[arg(long, value_name = "GROUP:PORT", num_args = 0..=1, require_equals = true,
          default_missing_value = "239.255.72.69:7077", value_parser = group)]
    announce: Option<SocketAddrV4>,
    /// This host's address on the network that is told [default: that of --listen]
    #[arg(long, value_name = "ADDRESS", requires = "announce")]
    announce_from: Option<Ipv4Addr>,
    /// A file with a secret that all nodes of the network have; others are not believed
    #[arg(long, value_name = "FILE", requires = "announce")]
    announce_key: Option<PathBuf>,
}

impl AnnounceArgs {
    /// Whether there is something to announce, or to hear.
    pub(crate) fn is_wanted(&self) -> bool {
        self.announce.is_some()
    }

    /// The network, if there is one to be told. `lends_at` is where the node's donor is to serve,
    /// if it has one.
    pub(crate) fn join(
        &self,
        lends_at: Option<SocketAddr>,
        insecure: bool,
    ) -> anyhow::Result<Option<Network>> {
        let Some(group) = self.announce else { return Ok(None) };
        let listened = match lends_at.map(|address| address.ip()) {
            Some(IpAddr::V4(address)) if !address.is_unspecified() => Some(address),
            _ => None,
        };
        let Some(here) = self.announce_from.or(listened) else {
            usage!(
                "--announce needs this host's address on the network: add --announce-from ADDRESS"
            );
        };
        let key = self.announce_key.as_deref().map(Key::read).transpose()?;
        if key.is_none() && !here.is_loopback() && !insecure {
            usage!(
                "--announce from {here}: whoever is on that network could name donors of its own; \
                 add --announce-key FILE, or --insecure if the network is trusted"
            );
        }
        let network = Network::join(group, here, key).context("--announce")?;
        Ok(Some(network))
    }
}

/// A group, or a broadcast address: nothing else reaches several hosts.
fn group(text: &str) -> Result<SocketAddrV4, String> {
    let group: SocketAddrV4 = text
        .parse()
        .map_err(|_| "write an IPv4 address and a port, such as 239.255.72.69:7077".to_owned())?;
    let ends_in_ones = group.ip().octets()[3] & 1 == 1;
    if group.port() == 0 || !(group.ip().is_multicast() || ends_in_ones) {
        return Err(
            "it is neither a multicast group nor a broadcast address, with a port".to_owned()
        );
    }
    Ok(group)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_checked() {
        for good in ["239.255.72.69:7077", "224.0.0.251:1", "10.0.0.255:7077", "255.255.255.255:1"]
        {
            assert!(group(good).is_ok(), "{good}");
        }
        for bad in ["", "239.255.72.69", "239.255.72.69:0", "10.0.0.2:7077", "[ff02::1]:7077"] {
            assert!(group(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_network_that_others_are_on_takes_a_key_or_a_word() {
        let args = |from: &str| AnnounceArgs {
            announce: Some("239.255.72.69:7077".parse().unwrap()),
            announce_from: Some(from.parse().unwrap()),
            announce_key: None,
        };
        let said = args("192.0.2.1").join(None, false).unwrap_err().to_string();
        assert!(said.contains("--announce-key") && said.contains("192.0.2.1"), "{said}");
        let nowhere = AnnounceArgs { announce_from: None, ..args("127.0.0.1") };
        let said = nowhere.join(Some("0.0.0.0:7071".parse().unwrap()), true).unwrap_err();
        assert!(said.to_string().contains("--announce-from"), "{said}");
        assert!(args("127.0.0.1").join(None, false).unwrap().is_some());
    }
}
