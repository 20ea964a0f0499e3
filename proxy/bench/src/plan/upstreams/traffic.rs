//! Three traces of requests: agents, chats and batches.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// One request of a conversation.
#[derive(Debug, Clone, Copy)]
pub(super) struct SimTurn {
    /// Tokens of the whole prompt.
    pub n_prompt: u32,
    pub n_reply: u32,
    /// Seconds from the end of the turn before it.
    pub pause: f64,
}

/// Requests that follow one another; each prompt begins with the one before it.
#[derive(Debug, Clone)]
pub(super) struct SimConversation {
    /// Conversations of a group begin with the same tokens.
    pub group: usize,
    pub n_shared: u32,
    /// When it begins, in seconds.
    pub begins: f64,
    pub turns: Vec<SimTurn>,
}

/// A kind of traffic.
#[derive(Debug, Clone, Copy)]
pub(super) struct SimTraffic {
    pub name: &'static str,
    /// Tokens that the conversations of a group share, and the number of groups.
    n_shared: u32,
    n_groups: usize,
    n_turns: [u32; 2],
    /// Tokens of a message.
    n_message: [u32; 2],
    /// Tokens of a reply, at least and at most.
    pub n_reply: [u32; 2],
    /// Seconds between turns.
    pause: [f64; 2],
    /// Seconds between the beginnings of conversations.
    interval: f64,
    /// Conversations that begin together.
    n_together: usize,
}

pub(super) const TRAFFIC: [SimTraffic; 3] = [
    SimTraffic {
        name: "agents",
        n_shared: 6_000,
        n_groups: 3,
        n_turns: [6, 16],
        n_message: [200, 1_500],
        n_reply: [60, 200],
        pause: [0.5, 4.0],
        interval: 15.0,
        n_together: 1,
    },
    SimTraffic {
        name: "chats",
        n_shared: 400,
        n_groups: 1,
        n_turns: [1, 8],
        n_message: [20, 200],
        n_reply: [100, 400],
        pause: [10.0, 60.0],
        interval: 4.0,
        n_together: 1,
    },
    SimTraffic {
        name: "batches",
        n_shared: 1_000,
        n_groups: 5,
        n_turns: [1, 1],
        n_message: [500, 4_000],
        n_reply: [20, 60],
        pause: [0.0, 0.0],
        interval: 60.0,
        n_together: 16,
    },
];

impl SimTraffic {
    /// At least so many requests.
    pub(super) fn conversations(&self, n_requests: usize, seed: u64) -> Vec<SimConversation> {
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut all, mut n, mut begins) = (Vec::new(), 0, 0.0);
        while n < n_requests {
            let group = rng.random_range(0..self.n_groups);
            for _ in 0..self.n_together {
                let conversation = self.conversation(group, begins, &mut rng);
                n += conversation.turns.len();
                all.push(conversation);
            }
            // Arrivals that know nothing of each other.
            let uniform: f64 = rng.random_range(1e-9..1.0);
            begins += -uniform.ln() * self.interval;
        }
        all
    }

    fn conversation(&self, group: usize, begins: f64, rng: &mut StdRng) -> SimConversation {
        let [least, most] = self.n_turns;
        let mut n_prompt = self.n_shared;
        let turns = (0..rng.random_range(least..=most)).map(|_| {
            n_prompt += rng.random_range(self.n_message[0]..=self.n_message[1]);
            let n_reply = rng.random_range(self.n_reply[0]..=self.n_reply[1]);
            let turn = SimTurn { n_prompt, n_reply, pause: rng.random_range(self.pause[0]..=self.pause[1]) };
            n_prompt += n_reply;
            turn
        });
        let turns = turns.collect();
        SimConversation { group, n_shared: self.n_shared, begins, turns }
    }
}
