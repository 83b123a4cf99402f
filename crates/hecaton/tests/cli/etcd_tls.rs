//! Managers whose etcd speaks TLS only, and only to those whom it knows, with the real etcd.

use crate::common::{Daemon, hecaton, scratch, signal_process, text, wait};
use hecaton_testkit::unused_port;
use hecaton_testkit::{wait_until, wait_until_seen};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use rustix::process::Signal;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// An authority that is not Hecaton's own.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new(name: &str) -> Authority {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).expect("signed").pem();
        Authority { pem, issuer: Issuer::new(params, key) }
    }

    /// A directory as --etcd-tls takes it, or what is there already with new contents.
    fn issue(&self, dir: &Path, uses: &[ExtendedKeyUsagePurpose]) -> PathBuf {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(["127.0.0.1".to_owned()]).expect("a name");
        params.extended_key_usages = uses.to_vec();
        let certificate = params.signed_by(&key, &self.issuer).expect("signed").pem();
        fs::create_dir_all(dir).expect("made");
        for (name, contents) in
            [("ca.pem", &self.pem), ("key.pem", &key.serialize_pem()), ("cert.pem", &certificate)]
        {
            let path = dir.join(name);
            fs::write(&path, contents).expect("written");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("set");
        }
        dir.to_owned()
    }
}

/// A process that is killed with the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        signal_process(self.0.id(), Signal::KILL);
        wait(&mut self.0);
    }
}

fn etcd(data: &Path, certificates: &Path, url: &str) -> Killed {
    let peer = format!("http://127.0.0.1:{}", unused_port());
    let mut command = Command::new("etcd");
    command.args(["--listen-client-urls", url, "--advertise-client-urls", url]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("default={peer}"), "--unsafe-no-fsync"]);
    command.arg("--client-cert-auth");
    command.arg("--trusted-ca-file").arg(certificates.join("ca.pem"));
    command.arg("--cert-file").arg(certificates.join("cert.pem"));
    command.arg("--key-file").arg(certificates.join("key.pem"));
    command.arg("--data-dir").arg(data);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Killed(command.spawn().expect("etcd starts"))
}

/// A manager with its log in a file.
fn manager(url: &str, tls: &Path, log: &Path) -> Daemon {
    let mut command = hecaton();
    let listen = format!("127.0.0.1:{}", unused_port());
    command.args(["manager", "--json", "--listen", &listen, "--etcd", url, "--etcd-tls"]).arg(tls);
    Daemon::start(command.env("HECATON_LOG", "info").stderr(File::create(log).expect("a file")))
}

fn leads(manager: &Daemon) -> bool {
    ureq::get(format!("{}/v1/status", manager.manager())).call().is_ok()
}

fn says(log: &Path, words: &str) {
    wait_until_seen(&format!("the log says `{words}`"), || {
        let said = fs::read_to_string(log).expect("read");
        if said.contains(words) { Ok(()) } else { Err(said) }
    });
}

/// Both ends show a certificate; who shows a wrong one is told so, and is let in with a new one
/// without being started again.
#[test]
fn a_manager_and_its_etcd_know_each_other() {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&paths).any(|dir| dir.join("etcd").is_file()) {
        eprintln!("SKIPPED: `etcd` is not installed");
        return;
    }
    use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
    let scratch = scratch();
    let path = |name: &str| scratch.path().join(name);
    let (known, unknown) = (Authority::new("known"), Authority::new("unknown"));
    // etcd's gateway asks etcd itself as a client, with the certificate of its server.
    let own = known.issue(&path("etcd"), &[ServerAuth, ClientAuth]);
    let url = format!("https://127.0.0.1:{}", unused_port());
    let _etcd = etcd(&path("data"), &own, &url);

    // Another authority's certificate is refused by etcd.
    let foreign = unknown.issue(&path("foreign"), &[ClientAuth]);
    fs::copy(own.join("ca.pem"), foreign.join("ca.pem")).expect("copied");
    let refused = manager(&url, &foreign, &path("refused.log"));
    says(&path("refused.log"), "it refuses the certificate in");
    // An etcd of another authority is refused by the manager.
    let elsewhere = known.issue(&path("elsewhere"), &[ClientAuth]);
    fs::write(elsewhere.join("ca.pem"), &unknown.pem).expect("written");
    let _distrustful = manager(&url, &elsewhere, &path("distrustful.log"));
    says(&path("distrustful.log"), "its certificate is not taken: no authority in");
    assert!(!leads(&refused), "etcd has taken another authority's certificate");

    let good = known.issue(&path("good"), &[ClientAuth]);
    let leader = manager(&url, &good, &path("leader.log"));
    wait_until("one manager leads", || leads(&leader));
    known.issue(&foreign, &[ClientAuth]);
    assert!(leader.end(Signal::TERM).success());
    wait_until("the other manager leads", || leads(&refused));
    let status = hecaton().args(["status", "--manager", refused.manager()]).output().expect("runs");
    assert!(status.status.success(), "{}", text(&status.stderr));
    for log in ["refused.log", "distrustful.log", "leader.log"] {
        assert!(!fs::read_to_string(path(log)).expect("read").contains("PRIVATE"));
    }
}
