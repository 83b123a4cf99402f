//! Runs the tests under libtest's command line, each in a world of its own.

use super::{
    cluster::{AFTER_LEASE, Cluster, PATIENCE, check_built},
    guest::Guests,
    world::{self, leftovers},
};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::{
    env,
    process::{Command, ExitCode},
};

/// Three donors, of which each lends this much. 24 programs at once need most of it.
const DONORS: u32 = 3;
const LEND: &str = "1500M";

/// How a test ended that did not fail.
pub(crate) enum Outcome {
    Passed,
    /// With the reason: this machine lacks something.
    Skipped(String),
}

pub(crate) type TestResult = anyhow::Result<Outcome>;

type Alone = Box<dyn Fn() -> TestResult + Send>;
type OnCluster = Box<dyn Fn(&Cluster) -> TestResult + Send>;
type WithGuests = Box<dyn Fn(&Guests) -> TestResult + Send>;
type OnClusterWithGuests = Box<dyn Fn(&Cluster, &Guests) -> TestResult + Send>;

/// The closure of a test, by what its signature asks for.
enum Body {
    /// Nothing: it starts a cluster of another kind.
    Alone(Alone),
    Cluster(OnCluster),
    Guests(WithGuests),
    ClusterAndGuests(OnClusterWithGuests),
}

/// A function that is a test. `Signature` tells the implementations apart.
pub(crate) trait IntoBody<Signature> {
    #[expect(private_interfaces, reason = "only the runner looks into a body")]
    fn into_body(self) -> Body;
}

impl<F: Fn() -> TestResult + Send + 'static> IntoBody<()> for F {
    #[expect(private_interfaces, reason = "only the runner looks into a body")]
    fn into_body(self) -> Body {
        Body::Alone(Box::new(self))
    }
}

impl<F: Fn(&Cluster) -> TestResult + Send + 'static> IntoBody<(Cluster,)> for F {
    #[expect(private_interfaces, reason = "only the runner looks into a body")]
    fn into_body(self) -> Body {
        Body::Cluster(Box::new(self))
    }
}

impl<F: Fn(&Guests) -> TestResult + Send + 'static> IntoBody<(Guests,)> for F {
    #[expect(private_interfaces, reason = "only the runner looks into a body")]
    fn into_body(self) -> Body {
        Body::Guests(Box::new(self))
    }
}

impl<F: Fn(&Cluster, &Guests) -> TestResult + Send + 'static> IntoBody<(Cluster, Guests)> for F {
    #[expect(private_interfaces, reason = "only the runner looks into a body")]
    fn into_body(self) -> Body {
        Body::ClusterAndGuests(Box::new(self))
    }
}

/// A named test.
pub(crate) struct Test {
    name: &'static str,
    body: Body,
}

impl Test {
    pub(crate) fn new<Signature>(name: &'static str, test: impl IntoBody<Signature>) -> Self {
        Self { name, body: test.into_body() }
    }

    fn needs_guests(&self) -> bool {
        matches!(self.body, Body::Guests(_) | Body::ClusterAndGuests(_))
    }

    /// The test itself, inside its world.
    fn run(&self) -> TestResult {
        let guests = || Guests::of_world();
        match &self.body {
            Body::Alone(test) => test(),
            Body::Guests(test) => test(&guests()?),
            Body::Cluster(test) => self.on_cluster(|cluster| test(cluster)),
            Body::ClusterAndGuests(test) => {
                let guests = guests()?;
                self.on_cluster(|cluster| test(cluster, &guests))
            }
        }
    }

    /// After a test nothing borrows any more, and the donors have all of their memory back.
    fn on_cluster(&self, test: impl Fn(&Cluster) -> TestResult) -> TestResult {
        let cluster = Cluster::start(DONORS, LEND)?;
        if let Err(reason) = cluster.check_userfaultfd() {
            return Ok(Outcome::Skipped(reason));
        }
        let outcome = test(&cluster)?;
        let kills = self.name.starts_with("crash::");
        cluster.wait_until_idle(if kills { AFTER_LEASE } else { PATIENCE })?;
        Ok(outcome)
    }

    /// The test in its world, as the runner sees it.
    fn in_world(&self) -> Result<Completion, Failed> {
        check_built()?;
        leftovers::remove();
        let guests = match self.needs_guests().then(Guests::build).transpose()? {
            Some(Err(reason)) => return Ok(self.skipped(reason)),
            Some(Ok(guests)) => Some(guests),
            None => None,
        };
        match world::run(self.name, guests.as_ref())? {
            Outcome::Passed => Ok(Completion::Completed),
            Outcome::Skipped(reason) => Ok(self.skipped(reason)),
        }
    }

    /// A runner that knows no skipped tests finds this line in the output.
    fn skipped(&self, reason: String) -> Completion {
        println!("skipped: {}: {reason}", self.name);
        Completion::ignored_with(reason)
    }
}

/// Runs the tests that the command line chooses, or the one that this process is the world of.
pub(crate) fn run(tests: Vec<Test>) -> ExitCode {
    if let Some(name) = world::name_of_test() {
        let test = tests.iter().find(|test| test.name == name).expect("its parent knows the test");
        return world::enter(|| test.run());
    }
    let arguments = Arguments::from_args();
    // A runner that lists the tests, or has built all, wants nothing built.
    if !arguments.list && env::var_os("NEXTEST").is_none() {
        build();
    }
    let trial = |test: Test| Trial::ignorable_test(test.name, move || test.in_world());
    libtest_mimic::run(&arguments, tests.into_iter().map(trial).collect()).exit_code()
}

/// `cargo test` of this package alone does not build the command that the tests run.
fn build() {
    let Some(cargo) = env::var_os("CARGO") else { return };
    let packages = ["-p", "hecaton-cli", "-p", "hecaton-preload"];
    let built = Command::new(cargo).args(["build", "--quiet", "--locked"]).args(packages).status();
    assert!(built.is_ok_and(|status| status.success()), "the hecaton command cannot be built");
}
