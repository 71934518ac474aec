"""A policy in ten lines: verification is asked for when the doubt about a draft adds up to too much."""

from pipesd.policy.plugin import BaseTrigger, Parameter, Policy


class Doubt(BaseTrigger):
    def reset(self):  # a new draft begins
        self.doubt = 0.0

    def observe(self, p_draft, entropy=0.0):  # one more draft token
        self.doubt += entropy
        return "doubt" if self.doubt > self.most else None


POLICY = Policy(name="doubt", trigger=Doubt, parameters={"most": Parameter(0.1, 20.0, log=True)}, first={"most": 2.0})
