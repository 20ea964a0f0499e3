//! The trace of an agent, for tests: turns of tool calls, with a new instruction of the user after every tenth. Earlier reasoning
//! is dropped then, as Qwen's template does.

use baton_schemas::Token;

/// The numbers of tokens of a trace, and the tokens that it is made of.
pub(super) struct AgentTrace {
    pub(super) n_system: usize,
    pub(super) n_instruction: usize,
    pub(super) n_tool_result: usize,
    pub(super) n_reasoning: usize,
    pub(super) n_call: usize,
    /// Text has the tokens below.
    pub(super) n_text: Token,
    /// What begins and what ends a message.
    pub(super) control: [Token; 2],
}

struct AgentTurn {
    asked: Vec<Token>,
    reasoning: Vec<Token>,
    call: Vec<Token>,
    is_instruction: bool,
}

impl AgentTrace {
    pub(super) fn text(&self, seed: u32, n: usize) -> Vec<Token> {
        (0..n as u32).map(|i| (i.wrapping_mul(seed * 2 + 7) + seed) % self.n_text).collect()
    }

    /// A message, and the head of its reply: what begins it, and three tokens that name the role and open the reasoning.
    pub(super) fn said(&self, seed: u32, n: usize) -> Vec<Token> {
        let [begin, end] = self.control;
        [&[begin], &self.text(seed, n)[..], &[end, 3, begin, 4, 5, 6]].concat()
    }

    /// The tokens of a prompt before the head of its reply.
    pub(super) fn n_before_reply(prompt: &[Token]) -> usize {
        prompt.len() - 4
    }

    /// Goes through `n_turns` turns. `ask` returns the reply of so many tokens to a prompt. Returns the number of prompt tokens
    /// that the client says anew, and of all prompts.
    pub(super) fn run(&self, n_turns: u32, mut ask: impl FnMut(&[Token], usize) -> Vec<Token>) -> (usize, usize) {
        let system = [&self.control[..1], &self.text(1, self.n_system)].concat();
        let (mut n_new, mut n_whole) = (system.len(), 0);
        let mut turns: Vec<AgentTurn> = Vec::new();
        for i in 0..n_turns {
            let is_instruction = i % 10 == 0;
            let asked = self.said(i + 2, if is_instruction { self.n_instruction } else { self.n_tool_result });
            let prompt = [system.clone(), prompt_of(&turns, is_instruction), asked.clone()].concat();
            n_new += asked.len();
            n_whole += prompt.len();
            let reply = ask(&prompt, self.n_reasoning + self.n_call);
            let (reasoning, call) = reply.split_at(self.n_reasoning);
            turns.push(AgentTurn { asked, reasoning: reasoning.to_vec(), call: call.to_vec(), is_instruction });
        }
        (n_new, n_whole)
    }
}

/// Earlier turns in a prompt: with their reasoning since the last instruction.
fn prompt_of(turns: &[AgentTurn], is_instruction: bool) -> Vec<Token> {
    let last = turns.iter().rposition(|turn| turn.is_instruction).filter(|_| !is_instruction).unwrap_or(turns.len());
    let of_turn = |(i, turn): (usize, &AgentTurn)| match i >= last {
        true => [&turn.asked[..], &turn.reasoning, &turn.call].concat(),
        // Without the token that opens the reasoning.
        false => [&turn.asked[..turn.asked.len() - 1], &turn.call].concat(),
    };
    turns.iter().enumerate().flat_map(of_turn).collect()
}
